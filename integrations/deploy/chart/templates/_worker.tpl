{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- /*
What a worker needs of the pod that it runs in, for charts of inference servers to merge into their own:
include "kvlink.worker" .Subcharts.kvlink | fromYaml
*/ -}}
{{- define "kvlink.worker" -}}
pod:
  enableServiceLinks: false # a Service called kvlink would otherwise set KVLINK_PORT
  terminationGracePeriodSeconds: {{ add .Values.worker.drain.graceSeconds .Values.worker.drain.serverSeconds }}
  {{- if .Values.worker.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
env:
  {{- with join "," .Values.worker.coordinators | default (include "kvlink.coordinators" .) }}
  - {name: KVLINK_COORDINATOR, value: {{ quote . }}}
  {{- end }}
  - {name: KVLINK_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  - {name: KVLINK_AGENT_PORT, value: {{ .Values.worker.ports.agent | quote }}}
  - {name: KVLINK_PORT, value: {{ .Values.worker.ports.data | quote }}}
  - {name: KVLINK_METRICS_PORT, value: {{ .Values.worker.ports.metrics | quote }}}
  {{- if .Values.insecure }}
  - {name: KVLINK_INSECURE, value: "1"}
  {{- else }}
  - {name: KVLINK_TLS_CA, value: /etc/kvlink/certs/ca.crt}
  - {name: KVLINK_TLS_CERT, value: /etc/kvlink/certs/tls.crt}
  - {name: KVLINK_TLS_KEY, value: /etc/kvlink/certs/tls.key}
  - {name: KVLINK_TLS_HOSTS, value: "0"} # certificates cannot name pods, so kvlink checks role and tenant only
  - {name: KVLINK_TICKET_KEYS, value: /etc/kvlink/tickets/keys}
  {{- end }}
  {{- range $key, $value := .Values.worker.env }}
  - {name: {{ $key }}, value: {{ $value | quote }}}
  {{- end }}
ports:
  {{- with .Values.worker.ports.agent }}
  - {name: kvlink-agent, containerPort: {{ . }}}
  {{- end }}
  {{- with .Values.worker.ports.data }}
  - {name: kvlink-data, containerPort: {{ . }}}
  {{- end }}
  {{- with .Values.worker.ports.metrics }}
  - {name: kvlink-metrics, containerPort: {{ . }}}
  {{- end }}
  {{- if not (or .Values.worker.ports.agent .Values.worker.ports.data .Values.worker.ports.metrics) }} []{{ end }}
lifecycle:
  preStop:
    exec:
      command:
        - kvlink
        - drain
        - --process=1
        - --notice-s={{ .Values.worker.drain.noticeSeconds }}
        - --grace-s={{ .Values.worker.drain.graceSeconds }}
limits:
  {{- if and .Values.worker.rdma.resource (not .Values.worker.rdma.hostPath) }}
  {{ .Values.worker.rdma.resource }}: 1
  {{- else }} {}{{ end }}
securityContext:
  {{- if .Values.worker.rdma.hostPath }}
  privileged: true
  {{- else }}
  capabilities: {add: {{ ternary "[IPC_LOCK]" "[]" .Values.worker.rdma.ipcLock }}}
  {{- end }}
volumeMounts:
  {{- if not .Values.insecure }}
  - {name: kvlink-certificates, mountPath: /etc/kvlink/certs, readOnly: true}
  - {name: kvlink-tickets, mountPath: /etc/kvlink/tickets, readOnly: true}
  {{- end }}
  {{- if .Values.worker.rdma.hostPath }}
  - {name: kvlink-infiniband, mountPath: /dev/infiniband}
  {{- end }}
  {{- if and .Values.insecure (not .Values.worker.rdma.hostPath) }} []{{ end }}
volumes:
  {{- if not .Values.insecure }}
  - name: kvlink-certificates
    secret: {secretName: {{ .Values.worker.secrets.certificates }}, defaultMode: 0440}
  - name: kvlink-tickets
    secret: {secretName: {{ .Values.worker.secrets.tickets }}, defaultMode: 0440}
  {{- end }}
  {{- if .Values.worker.rdma.hostPath }}
  - name: kvlink-infiniband
    hostPath: {path: /dev/infiniband, type: Directory}
  {{- end }}
  {{- if and .Values.insecure (not .Values.worker.rdma.hostPath) }} []{{ end }}
{{- end -}}
