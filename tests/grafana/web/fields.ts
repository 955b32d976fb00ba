// What Grafana's core registers at start and @grafana/data does not bring: the options of fields, and the transformations.
import * as data from '@grafana/data';

const d = data as any;

const PROCESSORS: Record<string, unknown> = {
  color: d.identityOverrideProcessor,
  decimals: d.numberOverrideProcessor,
  description: d.stringOverrideProcessor,
  displayName: d.displayNameOverrideProcessor,
  filterable: d.booleanOverrideProcessor,
  links: d.dataLinksOverrideProcessor,
  mappings: d.valueMappingsOverrideProcessor,
  max: d.numberOverrideProcessor,
  min: d.numberOverrideProcessor,
  noValue: d.stringOverrideProcessor,
  thresholds: d.thresholdsOverrideProcessor,
  unit: d.unitOverrideProcessor,
};

const item = (id: string, path: string, process: unknown, isCustom = false) => ({
  id, path, name: id, process, isCustom, shouldApply: () => true, editor: () => null, override: () => null,
});

export function register(): void {
  d.standardFieldConfigEditorRegistry.setInit(() => Object.entries(PROCESSORS).map(([id, process]) => item(id, id, process)));
  const unique = new Map(Object.values(d.standardTransformers).map((one: any) => [one.id, one]));
  d.standardTransformersRegistry.setInit(() =>
    [...unique.values()].map((one: any) => ({ id: one.id, name: one.name, transformation: () => Promise.resolve(one), editor: () => null }))
  );
}

// Options of the panel's own plugin: every one that the panel sets.
export function registryOf(panel: any): unknown {
  const { defaults, overrides } = panel.fieldConfig;
  const set = new Set<string>(Object.keys(defaults.custom ?? {}));
  for (const override of overrides) {
    for (const { id } of override.properties) {
      if (id.startsWith('custom.')) set.add(id.slice('custom.'.length));
    }
  }
  return new d.Registry(() => [
    ...Object.entries(PROCESSORS).map(([id, process]) => item(id, id, process)),
    ...[...set].map((name) => item(`custom.${name}`, name, d.identityOverrideProcessor, true)),
  ]);
}
