// Answers of Prometheus as data frames, the way Grafana's data source makes them, and what a panel does to them.
import * as data from '@grafana/data';
import { registryOf } from './fields';

const d = data as any;

export type Answer = { resultType: string; result: any[] };
export type Drawing = {
  dashboard: any;
  from: number;
  to: number;
  variables: Record<string, string>;
  events: Array<{ time: number; title: string; text: string; color: string }>;
  results: Record<string, Record<string, Answer>>;
};

export const filled = (text: string, variables: Record<string, string>): string =>
  text.replace(/\$\{(\w+)\}|\$(\w+)/g, (whole, a, b) => variables[a ?? b] ?? whole);

const number = (text: string): number => (text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text));

// Points of a series, with a null where some are missing: Grafana's plot does the same, but only the first time it is drawn.
function points(one: any): Array<[number, number | null]> {
  const given: Array<[number, string]> = one.values ?? [one.value];
  const step = Math.min(...given.slice(1).map(([time], i) => time - given[i][0]));
  return given.flatMap(([time, value], i) => {
    const late = i > 0 && time - given[i - 1][0] > step;
    return [...(late ? [[given[i - 1][0] + step, null] as [number, null]] : []), [time, number(value)] as [number, number]];
  });
}

function table(refId: string, answer: Answer, alone: boolean): any {
  const labels = [...new Set(answer.result.flatMap((one) => Object.keys(one.metric)))].sort();
  return d.toDataFrame({
    refId,
    fields: [
      { name: 'Time', type: 'time', values: answer.result.map((one) => one.value[0] * 1000) },
      ...labels.map((name) => ({ name, type: 'string', values: answer.result.map((one) => one.metric[name] ?? '') })),
      { name: alone ? 'Value' : `Value #${refId}`, type: 'number', values: answer.result.map((one) => number(one.value[1])) },
    ],
  });
}

function series(refId: string, answer: Answer, legend: string): any[] {
  return answer.result.map((one) => {
    const known = points(one);
    const name = legend === '__auto' ? undefined : d.renderLegendFormat(legend, one.metric).replace(/\s+/g, ' ').trim();
    return d.toDataFrame({
      refId,
      fields: [
        { name: 'Time', type: 'time', values: known.map(([time]) => time * 1000) },
        { name: 'Value', type: 'number', labels: one.metric, config: { displayNameFromDS: name }, values: known.map(([, value]) => value) },
      ],
    });
  });
}

export async function framesOf(panel: any, drawing: Drawing, theme: unknown): Promise<any[]> {
  const answers = drawing.results[panel.id] ?? {};
  let frames = panel.targets.flatMap((target: any) => {
    const answer = answers[target.refId];
    if (target.format === 'table') return answer.result.length ? [table(target.refId, answer, panel.targets.length === 1)] : [];
    return series(target.refId, answer, target.legendFormat);
  });
  if (panel.transformations && frames.length) {
    frames = await new Promise<any[]>((done) => d.transformDataFrame(panel.transformations, frames).subscribe(done));
  }
  frames = d.applyFieldOverrides({
    data: frames,
    fieldConfig: panel.fieldConfig,
    replaceVariables: (text: string) => filled(text, drawing.variables),
    theme,
    fieldConfigRegistry: registryOf(panel),
    timeZone: 'utc',
  });
  return frames.map((frame: any) => ({ ...frame, fields: frame.fields.map((field: any) => plain(field, frame, frames, theme)) }));
}

// The plot joins frames, and loses the name that this color comes from.
function plain(field: any, frame: any, frames: any[], theme: unknown): any {
  if (field.config.color?.mode !== 'palette-classic-by-name') return field;
  d.getFieldDisplayName(field, frame, frames);
  return { ...field, config: { ...field.config, color: { mode: 'fixed', fixedColor: d.getFieldSeriesColor(field, theme).color } } };
}
