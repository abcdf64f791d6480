{{/* Config files of the services: the settings that the chart sets, overlaid with `config`. */}}

{{/* (list root model): path or hub id under which a service loads a model */}}
{{- define "eyas.modelPath" -}}
{{- $source := (index . 0).Values.model.source -}}
{{- if has $source.kind (list "pvc" "hostPath") -}}
{{- printf "%s/%s" (trimSuffix "/" $source.mountPath) (trimPrefix "/" (index . 1)) -}}
{{- else -}}
{{- index . 1 -}}
{{- end -}}
{{- end -}}

{{/* (list root component): settings of all services */}}
{{- define "eyas.config.shared" -}}
{{- $root := index . 0 -}}
server:
  host: 0.0.0.0
  port: {{ include "eyas.port" . }}
telemetry:
  metrics_host: 0.0.0.0
  metrics_port: {{ include "eyas.metricsPort" $root }}
  log_format: json
registry:
  prefix: {{ $root.Values.redis.prefix | quote }}
  {{- if eq $root.Values.mode "plain" }}
  url: ${env:REGISTRY_URL}
  {{- end }}
{{- $peers := $root.Values.peers }}
{{- if or $peers.tls.existingSecret $peers.token.enabled }}
peers:
  {{- if $peers.token.enabled }}
  token_file: /etc/eyas-token/{{ $peers.token.key }}
  {{- end }}
  {{- if $peers.tls.existingSecret }}
  cert_file: /etc/eyas-peers/tls.crt
  key_file: /etc/eyas-peers/tls.key
  ca_file: /etc/eyas-peers/ca.crt
  tls_server_name: {{ $peers.tls.serverName | quote }}
  require_client_cert: {{ $peers.tls.requireClientCert }}
  allowed_names: {{ $peers.tls.allowedNames | toJson }}
  {{- end }}
{{- end }}
discovery:
  kind: {{ $root.Values.discovery.kind }}
  {{- if eq $root.Values.discovery.kind "kubernetes" }}
  kubernetes:
    namespace: {{ $root.Release.Namespace }}
    verifier_selector: kubernetes.io/service-name={{ include "eyas.name" (list $root "verifier") }}
    draft_selector: kubernetes.io/service-name={{ include "eyas.name" (list $root "draft") }}
    port_name: grpc
  {{- end }}
{{- end -}}

{{/* root: HTTP, API keys and TLS of the router */}}
{{- define "eyas.config.endpoints" -}}
http:
  host: 0.0.0.0
  port: {{ include "eyas.httpPort" . }}
  # Clients do not reach /metrics, /health and /openapi.json, which name models and count requests.
  operations_host: 0.0.0.0
  operations_port: {{ include "eyas.operationsPort" . }}
  playground: {{ .Values.router.playground }}
{{- with .Values.router.apiKeys }}
{{- if .existingSecret }}
api_keys:
  file: /etc/eyas-keys/{{ .key }}
  max_priority: {{ .maxPriority }}
  share_prefix_cache: {{ .sharePrefixCache }}
{{- end }}
{{- end }}
{{- if .Values.router.tls.existingSecret }}
tls:
  cert_file: /etc/eyas-tls/tls.crt
  key_file: /etc/eyas-tls/tls.key
{{- end }}
{{- end -}}

{{- define "eyas.config.router" -}}
{{- $own := include "eyas.config.shared" (list . "router") | fromYaml -}}
{{- $endpoints := include "eyas.config.endpoints" . | fromYaml -}}
{{- $model := dict "name" .Values.model.servedModelName "tokenizer" (include "eyas.modelPath" (list . .Values.model.model)) -}}
{{- with .Values.model.chatTemplate -}}{{- $_ := set $model "chat_template" . -}}{{- end -}}
{{- $_ := set $model "tool_call_parser" .Values.model.toolCallParser -}}
{{- $_ := set $model "reasoning_parser" .Values.model.reasoningParser -}}
{{- mergeOverwrite $own $endpoints (dict "models" (list $model)) (deepCopy .Values.router.config) | toYaml -}}
{{- end -}}

{{/* root: drafting method; verifier and drafter must agree on it */}}
{{- define "eyas.config.method" -}}
method: {{ .Values.draft.method }}
{{- with .Values.draft.draftModel }}
draft_model: {{ include "eyas.modelPath" (list $ .) }}
{{- end }}
tree:
  {{- toYaml .Values.draft.tree | nindent 2 }}
{{- end -}}

{{- define "eyas.config.verifier" -}}
{{- $own := include "eyas.config.shared" (list . "verifier") | fromYaml -}}
{{- $model := dict "served_model_name" .Values.model.servedModelName "model" (include "eyas.modelPath" (list . .Values.model.model)) -}}
{{- $device := dict "dtype" .Values.model.dtype "device" .Values.model.device "engine" (dict "tensor_parallel_size" .Values.verifier.tensorParallelSize) -}}
{{- $draft := dict -}}
{{- if .Values.draft.enabled -}}
{{- $draft = include "eyas.config.method" . | fromYaml -}}
{{- end -}}
{{- mergeOverwrite $own $model $device $draft (deepCopy .Values.verifier.config) | toYaml -}}
{{- end -}}

{{- define "eyas.config.draft" -}}
{{- $own := include "eyas.config.shared" (list . "draft") | fromYaml -}}
{{- $model := dict "served_model_name" .Values.model.servedModelName "model" (include "eyas.modelPath" (list . .Values.model.model)) -}}
{{- $device := dict "dtype" .Values.model.dtype "device" .Values.model.device -}}
{{- $draft := include "eyas.config.method" . | fromYaml -}}
{{- mergeOverwrite $own $model $device $draft (deepCopy .Values.draft.config) | toYaml -}}
{{- end -}}

{{/* component values: terminationGracePeriodSeconds, longer than a complete graceful shutdown */}}
{{- define "eyas.grace" -}}
{{- $server := .config.server | default dict -}}
{{- addf .preStopSeconds ($server.shutdown_delay_s | default 0) (hasKey $server "graceful_shutdown_timeout_s" | ternary $server.graceful_shutdown_timeout_s 30) 15 | ceil | int -}}
{{- end -}}
