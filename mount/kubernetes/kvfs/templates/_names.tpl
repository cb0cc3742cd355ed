{{- define "kvfs.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvfs.selector" -}}
app.kubernetes.io/name: kvfs
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvfs.labels" -}}
{{ include "kvfs.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvfs.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "kvfs.name" .) .Values.serviceAccount.name }}{{ else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "kvfs.mountpoint" -}}
{{ .Values.mount.directory }}/{{ .Values.mount.name }}
{{- end }}

{{/* What stands behind `kvfs mount -o`. allow_other: applications are other users. */}}
{{- define "kvfs.options" -}}
{{- $found := list "allow_other" "noatime" (printf "ram=%v" .Values.ram) (printf "metrics=0.0.0.0:%d" (int .Values.metrics.port)) }}
{{- with .Values.nvme.hostPath }}{{ $found = append $found (printf "nvme=%s" .) }}{{ end }}
{{- with .Values.nvme.size }}{{ $found = append $found (printf "nvme_size=%s" .) }}{{ end }}
{{- with .Values.s3.url }}
{{- $found = append $found (printf "s3=%s" .) }}
{{- $found = append $found (printf "s3_required=%s" (ternary "on" "off" $.Values.s3.required)) }}
{{- end }}
{{- with .Values.s3.endpoint }}{{ $found = append $found (printf "s3_endpoint=%s" .) }}{{ end }}
{{- with .Values.s3.region }}{{ $found = append $found (printf "s3_region=%s" .) }}{{ end }}
{{- if .Values.namespaces }}{{ $found = append $found "namespaces=/etc/kvfs/namespaces.toml" }}{{ end }}
{{- join "," (concat $found .Values.extraOptions) }}
{{- end }}
