{{- define "vllm-oom-exporter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "vllm-oom-exporter.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "vllm-oom-exporter.selector" -}}
app.kubernetes.io/name: {{ include "vllm-oom-exporter.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "vllm-oom-exporter.labels" -}}
{{ include "vllm-oom-exporter.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: vllm-oom-exporter
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "vllm-oom-exporter.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end }}
{{- end }}

{{- define "vllm-oom-exporter.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "vllm-oom-exporter.fullname" .) .Values.serviceAccount.name }}{{ else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{/* What no field of a schema can say. */}}
{{- define "vllm-oom-exporter.check" -}}
{{- if and .Values.alertmanager.urls .Values.alertmanager.existingSecret.name }}
{{- fail "alertmanager.urls and alertmanager.existingSecret.name: give one of them, not both" }}
{{- end }}
{{- if and .Values.sidecar.rbac.create (not .Values.sidecar.rbac.serviceAccounts) }}
{{- fail "sidecar.rbac.serviceAccounts: name the service accounts of vLLM's pods; without, the Role is bound to nobody, and sidecar.rbac.create does nothing" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.from) }}
{{- fail "networkPolicy.from: name who may scrape; an empty list lets everybody in" }}
{{- end }}
{{- range $key := list "log" "node" "targets" "node_match" "vllm_url" "listen" "state_dir" }}
{{- if hasKey $.Values.config $key }}
{{- fail (printf "config.%s: is set by the chart; use the values of nodeAgent or sidecar" $key) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Variables that every exporter gets. */}}
{{- define "vllm-oom-exporter.env" -}}
{{- if .Values.alertmanager.urls }}
- name: VLLM_OOM_ALERTMANAGER_URL
  value: {{ join "," .Values.alertmanager.urls | quote }}
{{- else if .Values.alertmanager.existingSecret.name }}
- name: VLLM_OOM_ALERTMANAGER_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.alertmanager.existingSecret.name }}
      key: {{ .Values.alertmanager.existingSecret.key }}
{{- end }}
{{- range $key, $value := .Values.config }}
- name: VLLM_OOM_{{ upper $key }}
  value: {{ (kindIs "slice" $value | ternary (join "," $value) (toString $value)) | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "vllm-oom-exporter.probeAndPort" -}}
ports:
  - name: oom-metrics
    containerPort: 10977
# its own event loop and nothing of vLLM's
livenessProbe:
  httpGet:
    path: /-/healthy
    port: oom-metrics
  periodSeconds: 20
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}
