{{/* Names and labels. Selectors contain only labels that no upgrade changes. */}}

{{- define "eyas.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains "eyas" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-eyas" (.Release.Name | trunc 35 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* (list root component) */}}
{{- define "eyas.name" -}}
{{- printf "%s-%s" (include "eyas.fullname" (index . 0)) (index . 1) -}}
{{- end -}}

{{/* (list root component) */}}
{{- define "eyas.selector" -}}
app.kubernetes.io/name: eyas
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* (list root component): labels of a pod. Without versions, so that an upgrade of the chart alone restarts nothing. */}}
{{- define "eyas.podLabels" -}}
{{- $root := index . 0 -}}
{{ include "eyas.selector" . }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (list root component): labels of every other object */}}
{{- define "eyas.labels" -}}
{{- $root := index . 0 -}}
{{ include "eyas.podLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | quote }}
{{- end -}}

{{/* (list root component): name, namespace and labels */}}
{{- define "eyas.metadata" -}}
name: {{ include "eyas.name" . }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "eyas.labels" . | nindent 2 }}
{{- end -}}

{{/* Label matchers of this release's metrics in PromQL. */}}
{{- define "eyas.matchers" -}}
{{- tpl .Values.prometheus.matchers . -}}
{{- end -}}

{{/* (list root component) */}}
{{- define "eyas.serviceAccountName" -}}
{{- $account := (index (index . 0).Values (index . 1)).serviceAccount -}}
{{- $account.name | default (ternary (include "eyas.name" .) "default" $account.create) -}}
{{- end -}}

{{/* (list root image) */}}
{{- define "eyas.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $own := printf "%s:%s" $image.repository ($root.Values.image.tag | default $root.Chart.AppVersion) -}}
{{- $root.Values.image.registry | empty | ternary $own (printf "%s/%s" (trimSuffix "/" $root.Values.image.registry) $own) -}}
{{- end -}}

{{/* Enabled services, as a JSON list under the key "list". */}}
{{- define "eyas.components" -}}
{{- $all := list "router" "verifier" -}}
{{- if .Values.draft.enabled -}}{{- $all = append $all "draft" -}}{{- end -}}
{{- dict "list" $all | toJson -}}
{{- end -}}

{{/* (list root component): gRPC port */}}
{{- define "eyas.port" -}}
{{- get (dict "router" 50050 "verifier" 50051 "draft" 50052) (index . 1) -}}
{{- end -}}

{{/* root: Secret with the token that the services share; empty without one */}}
{{- define "eyas.tokenSecret" -}}
{{- with .Values.peers.token -}}
{{- if .enabled -}}{{- .existingSecret | default (include "eyas.name" (list $ "token")) -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "eyas.httpPort" -}}8000{{- end -}}
{{- define "eyas.operationsPort" -}}8080{{- end -}}
{{- define "eyas.metricsPort" -}}9464{{- end -}}
{{- define "eyas.redisPort" -}}6379{{- end -}}
