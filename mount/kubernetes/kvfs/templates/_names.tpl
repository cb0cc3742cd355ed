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

{{/* Classes belong to the cluster, not to a namespace. */}}
{{- define "kvfs.priorityClass" -}}
{{- if .Values.priorityClass.create }}{{ default (printf "%s-%s" .Release.Namespace (include "kvfs.name" .)) .Values.priorityClass.name }}{{ else }}{{ .Values.priorityClass.name }}{{ end }}
{{- end }}

{{- define "kvfs.mountpoint" -}}
{{ .Values.mount.directory }}/{{ .Values.mount.name }}
{{- end }}

{{/* MiB of a size. kvfs's G is 2^30 bytes, as is Gi of Kubernetes; G of Kubernetes is 10^9. */}}
{{- define "kvfs.mebibytes" -}}
{{- $text := toString .size }}
{{- $number := regexFind "^[0-9.]+" $text | float64 }}
{{- $unit := regexFind "[KMGTPkmgtp]" $text | upper }}
{{- $powers := dict "" 0 "K" 1 "M" 2 "G" 3 "T" 4 "P" 5 }}
{{- $base := ternary 1024.0 1000.0 (or .binary (contains "i" $text)) }}
{{- range until (int (get $powers $unit)) }}{{ $number = mulf $number $base }}{{ end }}
{{- divf $number 1048576.0 | floor }}
{{- end }}

{{/* Fails if the pod would be killed when its RAM tier is full. */}}
{{- define "kvfs.checkMemory" -}}
{{- $limit := dig "limits" "memory" "" .Values.resources }}
{{- if $limit }}
{{- $ram := include "kvfs.mebibytes" (dict "size" .Values.ram "binary" true) | float64 }}
{{- $most := include "kvfs.mebibytes" (dict "size" $limit "binary" false) | float64 }}
{{- if ge $ram $most }}
{{- fail (printf "ram=%v with resources.limits.memory=%v: the RAM tier is memory of the pod, which would be killed; expected a limit of 2 GiB more than ram" .Values.ram $limit) }}
{{- end }}
{{- end }}
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
{{- with .Values.pool.url }}
{{- if not (or $.Values.pool.allow $.Values.pool.tlsSecretName) }}
{{- fail "pool.url without pool.allow: every machine could read the objects; expected the networks of the pods in pool.allow, or pool.tlsSecretName" }}
{{- end }}
{{- /* A comma in an option is \, there: sentinels and clusters have several hosts. */}}
{{- $found = append $found (printf "pool=%s" (replace "," "\\," .)) }}
{{- $found = append $found "pool_address=$(POD_IP)" }}
{{- $found = append $found (printf "pool_required=%s" (ternary "on" "off" $.Values.pool.required)) }}
{{- with $.Values.pool.allow }}{{ $found = append $found (printf "pool_allow=%s" .) }}{{ end }}
{{- if $.Values.pool.tlsSecretName }}{{ $found = append $found "pool_tls=/etc/kvfs-pool" }}{{ end }}
{{- end }}
{{- if .Values.namespaces }}{{ $found = append $found "namespaces=/etc/kvfs/namespaces.toml" }}{{ end }}
{{- join "," (concat $found .Values.extraOptions) }}
{{- end }}
