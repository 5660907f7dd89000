{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- define "kvlink.name" -}}
{{- printf "%s-kvlink" .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvlink.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "kvlink.instance" -}}
app.kubernetes.io/name: kvlink
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvlink.release" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "kvlink.selector" -}}
{{ include "kvlink.instance" . }}
app.kubernetes.io/component: coordinator
{{- end -}}

{{- define "kvlink.labels" -}}
{{ include "kvlink.selector" . }}
{{ include "kvlink.release" . }}
{{- end -}}

{{- define "kvlink.coordinators" -}}
{{- $name := include "kvlink.name" . -}}
{{ range $n := until (int .Values.replicas) }}{{ if $n }},{{ end }}{{ $name }}-{{ $n }}.{{ $name }}.{{ $.Release.Namespace }}.svc:{{ $.Values.ports.grpc }}{{ end }}
{{- end -}}

{{- define "kvlink.check" -}}
{{- if and (gt (int .Values.replicas) 1) (not .Values.store.etcd) -}}
{{- fail "replicas: several coordinators share an etcd; set store.etcd, or set replicas: 1" -}}
{{- end -}}
{{- if and .Values.certificates.secret .Values.insecure -}}
{{- fail "insecure: it excludes certificates.secret; set that to an empty text, or set insecure: false" -}}
{{- end -}}
{{- if not (or .Values.certificates.secret .Values.insecure) -}}
{{- fail "certificates.secret: name a Secret with ca.crt, tls.crt and tls.key, or set insecure: true" -}}
{{- end -}}
{{- end -}}
