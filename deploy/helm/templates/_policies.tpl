{{/* Network policies. */}}

{{/* (list root component ...): a list of peers */}}
{{- define "eyas.peers" -}}
{{- $root := index . 0 -}}
{{- range $component := rest . }}
- podSelector:
    matchLabels:
      {{- include "eyas.selector" (list $root $component) | nindent 6 }}
{{- end }}
{{- end -}}

{{/* (list root port ...): who may read metrics, at the port of metrics and further ones */}}
{{- define "eyas.scrapers" -}}
{{- $root := index . 0 -}}
- ports: [{port: {{ include "eyas.metricsPort" $root }}}{{ range rest . }}, {port: {{ . }}}{{ end }}]
  from:
    {{- $root.Values.networkPolicy.scrapers | default (list (dict "namespaceSelector" dict)) | toYaml | nindent 4 }}
{{- end -}}

{{/* Egress of every Eyas pod: DNS, Redis, and external addresses at a few ports. */}}
{{- define "eyas.egress" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- if eq .Values.redis.kind "bundled" }}
- ports: [{port: {{ include "eyas.redisPort" . }}}]
  to:
    {{- include "eyas.peers" (list . "redis") | nindent 4 }}
{{- else if eq .Values.redis.kind "external" }}
- ports: [{port: {{ .Values.redis.external.port }}}]
{{- end }}
{{- with .Values.networkPolicy.egressPorts }}
- ports:
    {{- range . }}
    - port: {{ . }}
    {{- end }}
{{- end }}
{{- end -}}

{{/* (list root component): head of a policy that denies everything else */}}
{{- define "eyas.policy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "eyas.metadata" . | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "eyas.selector" . | nindent 6 }}
  policyTypes: [Ingress{{ if (index . 0).Values.networkPolicy.egress }}, Egress{{ end }}]
{{- end -}}
