// Draws a dashboard JSON with Grafana's components, from answers that were asked before. window.draw(drawing) gives a report:
// of every panel what it shows, as text.
import React from 'react';
import { createRoot } from 'react-dom/client';
import * as data from '@grafana/data';
import { BarGauge, BigValue, BigValueTextMode, GlobalStyles, PanelChrome, TimeSeries, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { initPluginTranslations } from '@grafana/i18n';
import { register } from './fields';
import { filled, framesOf, type Drawing } from './frames';
import { Events } from './events';
import { Heatmap } from './heatmap';

const d = data as any;
const WIDTH = 1600;
const COLUMN = WIDTH / 24;
const ROW = 38;  // 30 px and the gap of 8, as in Grafana
const GAP = 8;
const theme = d.createTheme({ colors: { mode: 'dark' } });

type Shown = { name: string; text: string; color?: string };
type Report = { id: number; type: string; title: string; shown: Shown[]; empty: boolean; failed?: string };

function names(frames: any[]): Shown[] {
  return frames.flatMap((frame) =>
    frame.fields
      .filter((field: any) => field.type !== 'time')
      .map((field: any) => {
        const known = field.values.filter((value: unknown) => value != null && !Number.isNaN(value));
        return { name: d.getFieldDisplayName(field, frame, frames), text: d.formattedValueToString(field.display(known[known.length - 1])) };
      })
  );
}

function cells(frame: any): Shown[] {
  return frame.fields.flatMap((field: any) =>
    field.values.map((value: unknown) => {
      const display = field.display(value);
      return { name: d.getFieldDisplayName(field, frame, [frame]), text: d.formattedValueToString(display), color: display.color };
    })
  );
}

function Body({ panel, frames, width, height, range, drawing, report }: any) {
  const note = (shown: Shown[]) => { report.shown = shown; };
  if (panel.type === 'text') {
    const html = d.renderTextPanelMarkdown(filled(panel.options.content, drawing.variables));
    report.empty = false;
    note([{ name: 'text', text: html }]);
    return <div className="markdown-html" style={{ height, overflow: 'auto' }} dangerouslySetInnerHTML={{ __html: html }} />;
  }
  const nothing = !frames.some((frame: any) => frame.length);
  report.empty = nothing;
  if (panel.type === 'stat' || panel.type === 'bargauge') {
    const { options } = panel;
    const values = () => d.getFieldDisplayValues({
      fieldConfig: panel.fieldConfig, reduceOptions: options.reduceOptions, replaceVariables: (text: string) => text, theme, data: frames, sparkline: false, timeZone: 'utc',
    });
    note(values().map(({ display }: any) => ({ name: display.title ?? '', text: d.formattedValueToString(display), color: display.color })));
    const one = panel.type === 'stat'
      ? ({ value, width, height, count, alignmentFactors }: any) => (
          <BigValue value={value.display} count={count} width={width} height={height} theme={theme} colorMode={options.colorMode} graphMode={options.graphMode}
            justifyMode={options.justifyMode} textMode={options.textMode ?? BigValueTextMode.Auto} alignmentFactors={alignmentFactors} disableWideLayout={!options.wideLayout} />
        )
      : ({ value, width, height, orientation, alignmentFactors }: any) => (
          <BarGauge value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)} width={width} height={height} theme={theme}
            orientation={orientation} displayMode={options.displayMode} valueDisplayMode={options.valueMode} namePlacement={options.namePlacement}
            showUnfilled={options.showUnfilled} alignmentFactors={alignmentFactors} itemSpacing={GAP} lcdCellWidth={12} />
        );
    return (
      <VizRepeater source={frames} getValues={values} renderValue={one as any} width={width} height={height} orientation={options.orientation} autoGrid renderCounter={1}
        getAlignmentFactors={d.getDisplayValueAlignmentFactors}
        minVizHeight={options.minVizHeight ?? 10} minVizWidth={options.minVizWidth ?? 10} maxVizHeight={options.maxVizHeight} itemSpacing={panel.type === 'stat' ? 3 : GAP} />
    );
  }
  if (nothing) {
    const text = panel.fieldConfig.defaults.noValue || 'No data';
    note([{ name: '', text }]);
    return <div style={{ display: 'flex', height, alignItems: 'center', justifyContent: 'center', color: theme.colors.text.secondary }}>{text}</div>;
  }
  if (panel.type === 'heatmap') return <Heatmap {...{ panel, frames, width, height, range, theme, drawing, note }} />;
  if (panel.type === 'timeseries') {
    note(names(frames));
    return (
      <TimeSeries frames={frames} width={width} height={height} timeRange={range} timeZone="utc" structureRev={1} legend={panel.options.legend} options={{}}>
        {(builder: any) => <Events builder={builder} drawing={drawing} theme={theme} />}
      </TimeSeries>
    );
  }
  if (panel.type === 'table') {
    note(cells(frames[0]));
    return (
      <TableNG data={frames[0]} width={width} height={height} timeRange={range} structureRev={1} getActions={() => []} enableSharedCrosshair={false} fieldConfig={panel.fieldConfig}
        showTypeIcons={false} cellHeight={panel.options.cellHeight} initialSortBy={panel.options.sortBy} noHeader={!panel.options.showHeader} />
    );
  }
  throw new Error(`no drawing for panels of type ${panel.type}`);
}

class Fence extends React.Component<any, { failed: string }> {
  state = { failed: '' };
  static getDerivedStateFromError(error: Error) { return { failed: String(error) }; }
  componentDidCatch(error: Error) { this.props.report.failed = String(error.stack); }
  render() { return this.state.failed ? <pre>{this.state.failed}</pre> : this.props.children; }
}

async function draw(drawing: Drawing): Promise<Report[]> {
  const { dashboard } = drawing;
  const range = { from: d.dateTimeForTimeZone('utc', drawing.from), to: d.dateTimeForTimeZone('utc', drawing.to), raw: { from: '', to: '' } };
  const reports: Report[] = [];
  const drawn: React.ReactNode[] = [];
  let rows = 0;
  for (const panel of dashboard.panels) {
    const { x, y, w, h } = panel.gridPos;
    rows = Math.max(rows, y + h);
    const place: React.CSSProperties = { position: 'absolute', left: x * COLUMN, top: y * ROW, width: w * COLUMN - GAP, height: h * ROW - GAP };
    if (panel.type === 'row') {
      drawn.push(<div key={panel.id} style={{ ...place, fontWeight: 500, lineHeight: `${ROW - GAP}px` }}>⌄ {filled(panel.title, drawing.variables)}</div>);
      continue;
    }
    const report: Report = { id: panel.id, type: panel.type, title: panel.title, shown: [], empty: true };
    reports.push(report);
    const frames = panel.type === 'text' ? [] : await framesOf(panel, drawing, theme);
    drawn.push(
      <div key={panel.id} style={place}>
        <Fence report={report}>
          <PanelChrome title={filled(panel.title, drawing.variables)} description={panel.description || undefined} width={w * COLUMN - GAP} height={h * ROW - GAP}>
            {(width: number, height: number) => <Body {...{ panel, frames, width, height, range, drawing, report }} />}
          </PanelChrome>
        </Fence>
      </div>
    );
  }
  const chosen = dashboard.templating.list.filter((one: any) => one.hide !== 2 && one.type !== 'datasource');
  createRoot(document.getElementById('root')!).render(
    <data.ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ padding: GAP, width: WIDTH + GAP, background: theme.colors.background.canvas }}>
        <h3>{dashboard.title}</h3>
        <div style={{ marginBottom: GAP, color: theme.colors.text.secondary }}>
          {chosen.map((one: any) => (
            <span key={one.name} style={{ marginRight: 24 }}>{one.label} <b style={{ color: theme.colors.text.primary }}>{drawing.variables[one.name] === '.*' ? 'All' : drawing.variables[one.name] || '–'}</b></span>
          ))}
          {d.dateTimeFormat(drawing.from, { timeZone: 'utc' })} to {d.dateTimeFormat(drawing.to, { timeZone: 'utc' })} UTC
        </div>
        <div style={{ position: 'relative', height: rows * ROW }}>{drawn}</div>
      </div>
    </data.ThemeContext.Provider>
  );
  await document.fonts.ready;
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 500))));
  return reports;
}

(window as any).ready = initPluginTranslations('grafana').then(() => {
  d.setTimeZoneResolver(() => 'utc');
  register();
  (window as any).draw = draw;
});
