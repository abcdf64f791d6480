{{/* (list root component resources account): a pod of the Ray cluster. KubeRay creates the service account of the head. */}}
{{- define "eyas.rayPod" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $own := index $root.Values $component -}}
metadata:
  labels:
    {{- include "eyas.podLabels" (list $root "ray") | nindent 4 }}
spec:
  {{- with index . 3 }}
  serviceAccountName: {{ . }}
  automountServiceAccountToken: false
  {{- end }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "eyas.grace" $own }}
  securityContext:
    {{- include "eyas.podSecurity" $root | nindent 4 }}
  {{- include "eyas.placement" (list $root $component) | replace (printf "app.kubernetes.io/component: %s" $component) "app.kubernetes.io/component: ray" | nindent 2 }}
  containers:
    - name: ray
      image: {{ include "eyas.image" (list $root $root.Values.ray.image) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      env:
        {{- include "eyas.env" (list $root $component) | nindent 8 }}
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        # KubeRay finds the port of its Service by this name.
        - {name: serve, containerPort: {{ include "eyas.httpPort" $root }}}
        - {name: grpc, containerPort: {{ include "eyas.port" (list $root "router") }}}
        - {name: metrics, containerPort: 8080}
      startupProbe:
        tcpSocket: {port: 52365}
        periodSeconds: 5
        failureThreshold: 60
      readinessProbe:
        httpGet: {path: /api/local_raylet_healthz, port: 52365}
        periodSeconds: 5
        timeoutSeconds: 3
      livenessProbe:
        httpGet: {path: /api/local_raylet_healthz, port: 52365}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 12
      lifecycle:
        preStop:
          exec: {command: [/bin/sh, -c, "ray stop"]}
      resources:
        {{- toYaml (index . 2) | nindent 8 }}
      securityContext:
        {{- include "eyas.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        {{- include "eyas.volumeMounts" (list $root $component) | nindent 8 }}
  volumes:
    {{- include "eyas.volumes" (list $root $component) | nindent 4 }}
{{- end -}}
