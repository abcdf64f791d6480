{{/* Parts of the pods of router, verifier and draft. All take (list root component). */}}

{{- define "eyas.podMetadata" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (index . 1) -}}
labels:
  {{- include "eyas.podLabels" . | nindent 2 }}
  {{- with $own.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include (printf "eyas.config.%s" (index . 1)) $root | sha256sum }}
  {{- if eq $root.Values.redis.kind "bundled" }}
  checksum/redis: {{ $root.Values.redis.auth.existingSecret | sha256sum }}
  {{- end }}
  {{- with $own.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "eyas.placement" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (index . 1) -}}
{{- $labels := $own.nodeSelector -}}
{{- if and $own.gpu $own.gpu.class (eq $root.Values.model.device "cuda") -}}
{{- $labels = merge (dict $own.gpu.classLabel $own.gpu.class) $labels -}}
{{- end -}}
{{- with $labels }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- $selector := $ | include "eyas.selector" | fromYaml }}
  {{- range . }}
  - {{- merge (dict "labelSelector" (dict "matchLabels" $selector)) . | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "eyas.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.security.runAsUser }}
runAsGroup: {{ .Values.security.runAsUser }}
fsGroup: {{ .Values.security.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "eyas.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Resource requests and limits, with GPUs. */}}
{{- define "eyas.resources" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (index . 1) -}}
{{- $resources := deepCopy $own.resources -}}
{{- if and $own.gpu (eq $root.Values.model.device "cuda") -}}
{{- $count := 1 -}}
{{- if and $own.multiNode (not $own.multiNode.enabled) -}}{{- $count = int $own.tensorParallelSize -}}{{- end -}}
{{- $gpus := dict $own.gpu.resource (toString $count) -}}
{{- $resources = mergeOverwrite $resources (dict "requests" $gpus "limits" (deepCopy $gpus)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "eyas.env" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $own := index $root.Values $component -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
# Empty if the cluster does not copy the node's topology labels to pods.
- name: ZONE
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
{{ include "eyas.registryEnv" $root }}
- name: HOME
  value: /tmp
{{- with $root.Values.model.source }}
{{- if eq .kind "hub" }}
- name: HF_HOME
  value: /var/cache/huggingface
{{- with .hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $root.Values.model.source.hub.tokenKey }}}}
{{- end }}
{{- else }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- end }}
{{- with $root.Values.telemetry.otlpEndpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . }}
- name: OTEL_SERVICE_NAME
  value: eyas-{{ $component }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ $root.Release.Namespace }},k8s.pod.name=$(POD_NAME)
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ $root.Values.telemetry.sampleRatio | quote }}
{{- end }}
{{- with $own.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* root: URL of Redis, from a Secret if there is one, so that no ConfigMap and no command line holds a password */}}
{{- define "eyas.registryEnv" -}}
- name: REGISTRY_URL
{{- if eq .Values.redis.kind "bundled" }}
  valueFrom: {secretKeyRef: {name: {{ include "eyas.redisSecret" . }}, key: url}}
{{- else if and (eq .Values.redis.kind "external") .Values.redis.external.existingSecret }}
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.external.existingSecret }}, key: {{ .Values.redis.external.urlKey }}}}
{{- else }}
  value: {{ eq .Values.redis.kind "none" | ternary "" .Values.redis.external.url | quote }}
{{- end }}
{{- end -}}

{{- define "eyas.redisSecret" -}}
{{- .Values.redis.auth.existingSecret | default (include "eyas.name" (list . "redis")) -}}
{{- end -}}

{{- define "eyas.volumeMounts" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (index . 1) -}}
{{- if eq $root.Values.mode "plain" }}
- {name: config, mountPath: /etc/eyas, readOnly: true}
{{- end }}
- {name: tmp, mountPath: /tmp}
{{- with $root.Values.model.source }}
{{- if eq .kind "hub" }}
- {name: cache, mountPath: /var/cache/huggingface}
{{- else if ne .kind "image" }}
- {name: models, mountPath: {{ .mountPath }}, readOnly: true}
{{- end }}
{{- end }}
{{- if $own.sharedMemory }}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- if and $own.tls $own.tls.existingSecret }}
- {name: tls, mountPath: /etc/eyas-tls, readOnly: true}
{{- end }}
{{- if $root.Values.peers.tls.existingSecret }}
- {name: peers, mountPath: /etc/eyas-peers, readOnly: true}
{{- end }}
{{- if $root.Values.peers.token.enabled }}
- {name: token, mountPath: /etc/eyas-token, readOnly: true}
{{- end }}
{{- if and $own.apiKeys $own.apiKeys.existingSecret }}
- {name: api-keys, mountPath: /etc/eyas-keys, readOnly: true}
{{- end }}
{{- with $own.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "eyas.volumes" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (index . 1) -}}
{{- if eq $root.Values.mode "plain" }}
- name: config
  configMap: {name: {{ include "eyas.name" . }}}
{{- end }}
- name: tmp
  emptyDir: {sizeLimit: 4Gi}
{{- with $root.Values.model.source }}
{{- if eq .kind "pvc" }}
- name: models
  persistentVolumeClaim: {claimName: {{ .pvc.claimName }}, readOnly: true}
{{- else if eq .kind "hostPath" }}
- name: models
  hostPath: {path: {{ .hostPath.path }}, type: Directory}
{{- else if and (eq .kind "hub") .hub.cacheClaim }}
- name: cache
  persistentVolumeClaim: {claimName: {{ .hub.cacheClaim }}}
{{- else if eq .kind "hub" }}
- name: cache
  emptyDir: {sizeLimit: {{ .hub.cacheSize }}}
{{- end }}
{{- end }}
{{- with $own.sharedMemory }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- if and $own.tls $own.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ $own.tls.existingSecret }}, defaultMode: 0440}
{{- end }}
{{- with $root.Values.peers.tls.existingSecret }}
- name: peers
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with include "eyas.tokenSecret" $root }}
- name: token
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if and $own.apiKeys $own.apiKeys.existingSecret }}
- name: api-keys
  secret: {secretName: {{ $own.apiKeys.existingSecret }}, defaultMode: 0440}
{{- end }}
{{- with $own.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (list root component role args): a container of one service; role is its container's name */}}
{{- define "eyas.container" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $own := index $root.Values $component -}}
- name: {{ $component }}
  image: {{ include "eyas.image" (list $root $own.image) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [python, -m, eyas.services.{{ $component }}]
  args:
    - --config
    - /etc/eyas/{{ $component }}.yaml
    - --set
    - server.zone="$(ZONE)"
    {{- if ne $component "router" }}
    - --set
    - server.advertise_host="$(POD_IP)"
    {{- end }}
  env:
    {{- include "eyas.env" (list $root $component) | nindent 4 }}
    {{- include "eyas.rankEnv" (list $root $component) | nindent 4 }}
  ports:
    - {name: grpc, containerPort: {{ include "eyas.port" (list $root $component) }}}
    {{- if eq $component "router" }}
    - {name: http, containerPort: {{ include "eyas.httpPort" $root }}}
    - {name: operations, containerPort: {{ include "eyas.operationsPort" $root }}}
    {{- end }}
    - {name: metrics, containerPort: {{ include "eyas.metricsPort" $root }}}
  {{- include "eyas.probes" (list $root $component) | nindent 2 }}
  lifecycle:
    preStop:
      sleep: {seconds: {{ $own.preStopSeconds }}}
  resources:
    {{- include "eyas.resources" (list $root $component) | nindent 4 }}
  securityContext:
    {{- include "eyas.containerSecurity" $root | nindent 4 }}
  volumeMounts:
    {{- include "eyas.volumeMounts" (list $root $component) | nindent 4 }}
{{- end -}}

{{/* Rank and leader address of a LeaderWorkerSet pod; LeaderWorkerSet sets the LWS_ variables first. */}}
{{- define "eyas.rankEnv" -}}
{{- $root := index . 0 -}}
{{- if and (eq (index . 1) "verifier") $root.Values.verifier.multiNode.enabled }}
- {name: RANK, value: $(LWS_WORKER_INDEX)}
- {name: WORLD_SIZE, value: $(LWS_GROUP_SIZE)}
- {name: MASTER_ADDR, value: $(LWS_LEADER_ADDRESS)}
- {name: MASTER_PORT, value: {{ $root.Values.verifier.multiNode.port | quote }}}
{{- end }}
{{- end -}}

{{/*
(list root component service): health probe of a worker's gRPC service, by its name in the health protocol.
A kubelet's gRPC probe has no TLS, so with TLS the image's own check runs.
*/}}
{{- define "eyas.look" -}}
{{- $root := index . 0 -}}
{{- $port := include "eyas.port" . -}}
{{- $service := index . 2 -}}
{{- with $root.Values.peers.tls -}}
{{- if .existingSecret -}}
exec: {command: [python, healthcheck.py, --tls, /etc/eyas-peers, --name, {{ .serverName | quote }}, --service, {{ $service | quote }}, "grpc://127.0.0.1:{{ $port }}"]}
{{- else -}}
grpc: {port: {{ $port }}, service: {{ $service | quote }}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Startup: until the weights are loaded. Readiness: accepts requests; a verifier in a stuck step does not. Liveness: the process
answers; one that does not will not drain either, so it is killed soon.
*/}}
{{- define "eyas.probes" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (index . 1) -}}
{{- if eq (index . 1) "router" -}}
startupProbe:
  httpGet: {path: /live, port: operations, scheme: HTTP}
  periodSeconds: 5
  failureThreshold: {{ $own.probes.startupFailureThreshold }}
readinessProbe:
  httpGet: {path: /ready, port: operations, scheme: HTTP}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /live, port: operations, scheme: HTTP}
{{- else -}}
{{- $look := include "eyas.look" (append . "") -}}
startupProbe:
  {{- $look | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ $own.probes.startupFailureThreshold }}
readinessProbe:
  {{- $look | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  {{- include "eyas.look" (append . "live") | nindent 2 }}
{{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
  terminationGracePeriodSeconds: 30
  failureThreshold: {{ $own.probes.livenessFailureThreshold }}
{{- end -}}

{{- define "eyas.podSpec" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (index . 1) -}}
serviceAccountName: {{ include "eyas.serviceAccountName" . }}
automountServiceAccountToken: {{ and (eq $root.Values.discovery.kind "kubernetes") (ne (index . 1) "draft") }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "eyas.grace" $own }}
securityContext:
  {{- include "eyas.podSecurity" $root | nindent 2 }}
{{- include "eyas.placement" . }}
containers:
  {{- include "eyas.container" . | nindent 2 }}
volumes:
  {{- include "eyas.volumes" . | nindent 2 }}
{{- end -}}
