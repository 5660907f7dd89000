{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- define "kvlink.name" -}}
{{- printf "%s-kvlink" .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvlink.selector" -}}
app.kubernetes.io/name: kvlink
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: coordinator
{{- end -}}

{{- define "kvlink.labels" -}}
{{ include "kvlink.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "kvlink.check" -}}
{{- if and (gt (int .Values.replicas) 1) (not .Values.store.etcd) -}}
{{- fail "replicas: several coordinators share an etcd; set store.etcd, or replicas: 1" -}}
{{- end -}}
{{- if and .Values.certificates.secret .Values.insecure -}}
{{- fail "insecure: take certificates.secret away as well, or keep TLS" -}}
{{- end -}}
{{- if not (or .Values.certificates.secret .Values.insecure) -}}
{{- fail "certificates.secret: name a Secret with ca.crt, tls.crt and tls.key, or say insecure: true" -}}
{{- end -}}
{{- end -}}
