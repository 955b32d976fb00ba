// Annotations: a dashed line with a flag at the bottom, as Grafana marks them.
import { useLayoutEffect } from 'react';
import type { Drawing } from './frames';

export function paintEvents(plot: any, events: Drawing['events'], theme: any): void {
  const { ctx, bbox } = plot;
  for (const { time, color } of events) {
    const x = plot.valToPos(time, 'x', true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(color);
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([5 * devicePixelRatio, 5 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.beginPath();
    const base = bbox.top + bbox.height, size = 5 * devicePixelRatio;
    ctx.moveTo(x, base);
    ctx.lineTo(x - size, base + size);
    ctx.lineTo(x + size, base + size);
    ctx.fill();
    ctx.restore();
  }
}

export function Events({ builder, drawing, theme }: any) {
  useLayoutEffect(() => {
    builder.addHook('draw', (plot: any) => paintEvents(plot, drawing.events, theme));
  }, [builder]);
  return null;
}
