{{/* The files of the services: what the chart knows, under it what `config` adds. */}}

{{/* (list root checkpoint): what a service finds it by */}}
{{- define "eyas.checkpoint" -}}
{{- $source := (index . 0).Values.model.source -}}
{{- if has $source.kind (list "pvc" "hostPath") -}}
{{- printf "%s/%s" (trimSuffix "/" $source.mountPath) (trimPrefix "/" (index . 1)) -}}
{{- else -}}
{{- index . 1 -}}
{{- end -}}
{{- end -}}

{{/* (list root component): what all services have */}}
{{- define "eyas.config.shared" -}}
{{- $root := index . 0 -}}
server:
  host: 0.0.0.0
  port: {{ include "eyas.port" . }}
telemetry:
  metrics_host: 0.0.0.0
  metrics_port: {{ include "eyas.metricsPort" $root }}
  log_format: json
{{- with $root.Values.peers.tls }}
{{- if .existingSecret }}
peers:
  cert_file: /etc/eyas-peers/tls.crt
  key_file: /etc/eyas-peers/tls.key
  ca_file: /etc/eyas-peers/ca.crt
  tls_server_name: {{ .name | quote }}
  require_client_cert: {{ .requireClientCert }}
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

{{/* root: the doors of the router */}}
{{- define "eyas.config.doors" -}}
http:
  host: 0.0.0.0
  port: {{ include "eyas.httpPort" . }}
{{- with .Values.router.apiKeys.existingSecret }}
api_keys:
  file: /etc/eyas-keys/{{ $.Values.router.apiKeys.key }}
{{- end }}
{{- if .Values.router.tls.existingSecret }}
tls:
  cert_file: /etc/eyas-tls/tls.crt
  key_file: /etc/eyas-tls/tls.key
{{- end }}
{{- end -}}

{{- define "eyas.config.router" -}}
{{- $own := include "eyas.config.shared" (list . "router") | fromYaml -}}
{{- $doors := include "eyas.config.doors" . | fromYaml -}}
{{- $model := dict "name" .Values.model.name "tokenizer" (include "eyas.checkpoint" (list . .Values.model.target)) -}}
{{- with .Values.model.chatTemplate -}}{{- $_ := set $model "chat_template" . -}}{{- end -}}
{{- mergeOverwrite $own $doors (dict "models" (list $model)) (deepCopy .Values.router.config) | toYaml -}}
{{- end -}}

{{/* root: how drafts are made, which verifier and drafter must agree on */}}
{{- define "eyas.config.method" -}}
method: {{ .Values.draft.method }}
{{- with .Values.draft.checkpoint }}
draft_model: {{ include "eyas.checkpoint" (list $ .) }}
{{- end }}
tree:
  {{- toYaml .Values.draft.tree | nindent 2 }}
{{- end -}}

{{- define "eyas.config.verifier" -}}
{{- $own := include "eyas.config.shared" (list . "verifier") | fromYaml -}}
{{- $model := dict "served_model_name" .Values.model.name "model" (include "eyas.checkpoint" (list . .Values.model.target)) -}}
{{- $device := dict "dtype" .Values.model.dtype "device" .Values.model.device "engine" (dict "tensor_parallel_size" .Values.verifier.tensorParallel) -}}
{{- $draft := dict -}}
{{- if .Values.draft.enabled -}}
{{- $draft = include "eyas.config.method" . | fromYaml -}}
{{- end -}}
{{- mergeOverwrite $own $model $device $draft (deepCopy .Values.verifier.config) | toYaml -}}
{{- end -}}

{{- define "eyas.config.draft" -}}
{{- $own := include "eyas.config.shared" (list . "draft") | fromYaml -}}
{{- $model := dict "served_model_name" .Values.model.name "model" (include "eyas.checkpoint" (list . .Values.model.target)) -}}
{{- $device := dict "dtype" .Values.model.dtype "device" .Values.model.device -}}
{{- $draft := include "eyas.config.method" . | fromYaml -}}
{{- mergeOverwrite $own $model $device $draft (deepCopy .Values.draft.config) | toYaml -}}
{{- end -}}

{{/* component values: seconds between the wish to stop and the kill; longer than all that a drain may take */}}
{{- define "eyas.grace" -}}
{{- $server := .config.server | default dict -}}
{{- addf .preStopSeconds ($server.shutdown_delay_s | default 0) (hasKey $server "graceful_shutdown_timeout_s" | ternary $server.graceful_shutdown_timeout_s 30) 15 | ceil | int -}}
{{- end -}}
