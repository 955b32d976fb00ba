// Grafana keeps its heatmap in the server's own code, so the cells are painted here, on Grafana's plot, with its axes.
import { UPlotChart, UPlotConfigBuilder, AxisPlacement, ScaleOrientation, ScaleDirection } from '@grafana/ui';
import { interpolateOranges } from 'd3-scale-chromatic';
import { paintEvents } from './events';
import type { Drawing } from './frames';

const COLORS = 64;

// Buckets come cumulated; a row is what is above the bucket before.
function rows(frames: any[]): Array<{ le: number; times: number[]; counts: number[] }> {
  const sorted = frames
    .map((frame) => ({ le: Number(frame.fields[1].labels.le.replace('+Inf', 'Infinity')), times: [...frame.fields[0].values], values: [...frame.fields[1].values] }))
    .sort((a, b) => a.le - b.le);
  return sorted.map(({ le, times, values }, at) => ({
    le,
    times,
    counts: values.map((value, i) => Math.max(0, value - (at ? (sorted[at - 1].values[i] ?? 0) : 0))),
  }));
}

export function Heatmap({ panel, frames, width, height, range, theme, drawing, note }: any) {
  const buckets = rows(frames);
  const { color, filterValues, cellGap, yAxis } = panel.options;
  const most = Math.max(...buckets.flatMap((row) => row.counts.filter(Number.isFinite)), 1);
  const times = buckets[0].times;
  const step = Math.min(...times.slice(1).map((time, i) => time - times[i]));
  note(buckets.map((row) => ({ name: String(row.le), text: String(Math.max(...row.counts.filter(Number.isFinite))) })));

  const builder = new UPlotConfigBuilder('utc');
  builder.addScale({ scaleKey: 'x', isTime: true, orientation: ScaleOrientation.Horizontal, direction: ScaleDirection.Right, range: () => [range.from.valueOf(), range.to.valueOf()] } as any);
  builder.addScale({ scaleKey: 'y', isTime: false, orientation: ScaleOrientation.Vertical, direction: ScaleDirection.Up, range: () => [0, buckets.length] } as any);
  builder.addAxis({ scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, timeZone: 'utc', theme } as any);
  builder.addAxis({
    scaleKey: 'y', placement: AxisPlacement.Left, theme, size: yAxis.axisWidth ?? null, grid: { show: false },
    splits: () => buckets.map((_, at) => at + 1),
    values: () => buckets.map(({ le }) => (Number.isFinite(le) ? le.toLocaleString('en') : '+Inf')),
  } as any);
  builder.addSeries({ scaleKey: 'y', pathBuilder: () => null, pointsBuilder: () => null, theme, facets: undefined } as any);
  builder.addHook('draw', (plot: any) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    buckets.forEach((row, at) => {
      const top = plot.valToPos(at + 1, 'y', true);
      const tall = plot.valToPos(at, 'y', true) - top - cellGap;
      row.times.forEach((time: number, i: number) => {
        const count = row.counts[i];
        if (!(count > filterValues.le)) return;
        const left = plot.valToPos(time - step, 'x', true);
        const share = Math.round(COLORS * (count / most) ** color.exponent) / COLORS;
        ctx.fillStyle = interpolateOranges(1 - share);  // dark theme: the palette is turned round
        ctx.fillRect(left, top, Math.max(1, plot.valToPos(time, 'x', true) - left - cellGap), tall);
      });
    });
    ctx.restore();
    paintEvents(plot, (drawing as Drawing).events, theme);
  });
  const line = times.map(() => null);
  return <UPlotChart config={builder} data={[times, line] as any} width={width} height={height} />;
}
