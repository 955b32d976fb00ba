{{/*
What adds the exporter to a pod of vLLM. A chart that has this one as a dependency calls them with this chart's context:

  {{- $oom := index .Subcharts "vllm-oom-exporter" }}
  initContainers:                                                          # containers: where sidecar.native is false
    {{- include "vllm-oom-exporter.sidecar" $oom | nindent 4 }}
  volumes:
    {{- include "vllm-oom-exporter.sidecarVolumes" $oom | nindent 4 }}
  # only with sidecar.log: shared-log, in the container of vLLM
  command: {{ include "vllm-oom-exporter.serveCommand" $oom }}
  volumeMounts:
    {{- include "vllm-oom-exporter.serveVolumeMounts" $oom | nindent 4 }}
*/}}
{{- define "vllm-oom-exporter.sidecar" -}}
{{- include "vllm-oom-exporter.check" . -}}
- name: vllm-oom-exporter
  image: {{ include "vllm-oom-exporter.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- if .Values.sidecar.native }}
  restartPolicy: Always
  {{- end }}
  args:
    - run
    - --log
    - {{ eq .Values.sidecar.log "shared-log" | ternary "/var/log/vllm/vllm.log" "kubernetes:" | quote }}
    - --state-dir
    - /var/lib/vllm-oom-exporter
    - --vllm-url
    - {{ .Values.sidecar.vllmUrl | quote }}
    {{- with .Values.extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    - name: POD_NAMESPACE
      valueFrom:
        fieldRef:
          fieldPath: metadata.namespace
    - name: POD_NAME
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
    {{- include "vllm-oom-exporter.env" . | trim | nindent 4 }}
  {{- include "vllm-oom-exporter.probeAndPort" . | nindent 2 }}
  resources:
    {{- toYaml .Values.sidecar.resources | nindent 4 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
    seccompProfile:
      type: RuntimeDefault
  volumeMounts:
    - name: vllm-oom-exporter-state
      mountPath: /var/lib/vllm-oom-exporter
    {{- if eq .Values.sidecar.log "shared-log" }}
    - name: vllm-log
      mountPath: /var/log/vllm
      readOnly: true
    {{- else }}
    - name: vllm-oom-exporter-token
      mountPath: /var/run/secrets/kubernetes.io/serviceaccount
      readOnly: true
    {{- end }}
{{- end }}

{{- define "vllm-oom-exporter.sidecarVolumes" -}}
- name: vllm-oom-exporter-state
  emptyDir:
    sizeLimit: 512Mi
{{- if eq .Values.sidecar.log "shared-log" }}
# two files of 32 MiB at most; above its limit a volume evicts the pod
- name: vllm-log
  emptyDir:
    sizeLimit: 128Mi
- name: vllm-oom-exporter-log
  configMap:
    name: {{ include "vllm-oom-exporter.fullname" . }}-log
{{- else }}
- name: vllm-oom-exporter-token
  projected:
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3607
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                fieldPath: metadata.namespace
{{- end }}
{{- end }}

{{- define "vllm-oom-exporter.serveCommand" -}}
["bash", "/opt/vllm-oom-exporter/serve.sh", "vllm", "serve"]
{{- end }}

{{- define "vllm-oom-exporter.serveVolumeMounts" -}}
- name: vllm-log
  mountPath: /var/log/vllm
- name: vllm-oom-exporter-log
  mountPath: /opt/vllm-oom-exporter
  readOnly: true
{{- end }}
