{{/* Combinations that no schema can refuse, each with its reason. */}}
{{- define "eyas.checks" -}}
{{- $source := .Values.model.source -}}
{{- if and (eq $source.kind "pvc") (not $source.pvc.claimName) -}}
{{- fail "model.source.kind is pvc; set model.source.pvc.claimName to the claim that holds the checkpoints" -}}
{{- end -}}
{{- if and (eq $source.kind "hostPath") (not $source.hostPath.path) -}}
{{- fail "model.source.kind is hostPath; set model.source.hostPath.path to the folder that holds the checkpoints" -}}
{{- end -}}
{{- if and (eq .Values.redis.kind "external") (not .Values.redis.external.url) (not .Values.redis.external.existingSecret) -}}
{{- fail "redis.kind is external; set redis.external.url, or redis.external.existingSecret to the secret that holds it" -}}
{{- end -}}
{{- if and (eq .Values.redis.kind "none") (eq .Values.discovery.kind "redis") -}}
{{- fail "redis.kind is none, but workers are found by their leases in Redis; set discovery.kind to kubernetes" -}}
{{- end -}}
{{- if (contains "@" .Values.redis.external.url) -}}
{{- fail "redis.external.url holds a password; put the URL into a secret and name it by redis.external.existingSecret" -}}
{{- end -}}
{{- if and .Values.verifier.multiNode.enabled (lt (int .Values.verifier.tensorParallelSize) 2) -}}
{{- fail "verifier.multiNode is enabled with tensorParallelSize 1; set verifier.tensorParallelSize to the number of pods of a group" -}}
{{- end -}}
{{- range $component := list "router" "verifier" "draft" -}}
{{- $scaling := (index $.Values $component).autoscaling -}}
{{- if and (eq $scaling.kind "hpa") (empty $scaling.metrics) -}}
{{- fail (printf "%s.autoscaling.kind is hpa; set %s.autoscaling.metrics to what it follows" $component $component) -}}
{{- end -}}
{{- if and (eq $scaling.kind "keda") (empty $scaling.triggers) -}}
{{- fail (printf "%s.autoscaling.kind is keda; set %s.autoscaling.triggers to what it follows" $component $component) -}}
{{- end -}}
{{- if and (ne $scaling.kind "none") (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas is above maxReplicas" $component) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.mode "ray") .Values.verifier.multiNode.enabled -}}
{{- fail "mode is ray; verifier.multiNode makes a LeaderWorkerSet, which is of mode plain" -}}
{{- end -}}
{{- if and (eq .Values.mode "ray") (ne .Values.discovery.kind "redis") -}}
{{- fail "mode is ray; set discovery.kind to redis, for on Ray workers are found by their leases" -}}
{{- end -}}
{{- if and (eq .Values.mode "ray") .Values.router.tls.existingSecret -}}
{{- fail "mode is ray; Ray's proxies are the doors, so leave router.tls.existingSecret empty and end TLS at the Ingress" -}}
{{- end -}}
{{- end -}}
