{{/* Combinations that the schema cannot reject. */}}
{{- define "eyas.checks" -}}
{{- $source := .Values.model.source -}}
{{- if and (eq $source.kind "pvc") (not $source.pvc.claimName) -}}
{{- fail "model.source.kind is pvc; set model.source.pvc.claimName to the claim that holds the checkpoints" -}}
{{- end -}}
{{- if and (eq $source.kind "hostPath") (not $source.hostPath.path) -}}
{{- fail "model.source.kind is hostPath; set model.source.hostPath.path to the folder that holds the checkpoints" -}}
{{- end -}}
{{- if and (eq .Values.redis.kind "external") (not .Values.redis.external.url) (not .Values.redis.external.existingSecret) -}}
{{- fail "redis.kind is external; set redis.external.url, or redis.external.existingSecret" -}}
{{- end -}}
{{- if and (eq .Values.redis.kind "none") (eq .Values.discovery.kind "redis") -}}
{{- fail "redis.kind is none, but discovery uses leases in Redis; set discovery.kind to kubernetes" -}}
{{- end -}}
{{- if (contains "@" .Values.redis.external.url) -}}
{{- fail "redis.external.url holds a password; put the URL into a Secret and set redis.external.existingSecret" -}}
{{- end -}}
{{- if and .Values.verifier.multiNode.enabled (lt (int .Values.verifier.tensorParallelSize) 2) -}}
{{- fail "verifier.multiNode is enabled with tensorParallelSize 1; set verifier.tensorParallelSize to the number of pods of a group" -}}
{{- end -}}
{{- range $component := list "router" "verifier" "draft" -}}
{{- $scaling := (index $.Values $component).autoscaling -}}
{{- if and (eq $scaling.kind "hpa") (empty $scaling.metrics) -}}
{{- fail (printf "%s.autoscaling.kind is hpa; set %s.autoscaling.metrics" $component $component) -}}
{{- end -}}
{{- if and (eq $scaling.kind "keda") (empty $scaling.triggers) (eq $component "router") -}}
{{- fail "router.autoscaling.kind is keda; set router.autoscaling.triggers" -}}
{{- end -}}
{{- if and (eq $scaling.kind "keda") (empty $scaling.triggers) (not $.Values.prometheus.address) -}}
{{- fail (printf "%s.autoscaling.kind is keda; set prometheus.address for the chart's own triggers, or %s.autoscaling.triggers" $component $component) -}}
{{- end -}}
{{- if and (ne $scaling.kind "none") (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas is above maxReplicas" $component) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.mode "ray") .Values.verifier.multiNode.enabled -}}
{{- fail "mode is ray; verifier.multiNode needs mode plain" -}}
{{- end -}}
{{- if and (eq .Values.mode "ray") (ne .Values.discovery.kind "redis") -}}
{{- fail "mode is ray; set discovery.kind to redis, because workers on Ray have leases only" -}}
{{- end -}}
{{- if and (eq .Values.mode "ray") .Values.router.tls.existingSecret -}}
{{- fail "mode is ray, where Ray's proxies accept the requests; leave router.tls.existingSecret empty and terminate TLS at the Ingress" -}}
{{- end -}}
{{- end -}}
