{{- define "downbeat.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* The name of a role's objects: downbeat for the one process, downbeat-backend in a cluster. */}}
{{- define "downbeat.role" -}}
{{- if eq .role "serve" }}{{ include "downbeat.name" .root }}{{ else }}{{ include "downbeat.name" .root }}-{{ .role }}{{ end }}
{{- end }}

{{- define "downbeat.release" -}}
app.kubernetes.io/part-of: downbeat
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "downbeat.selector" -}}
app.kubernetes.io/name: downbeat
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "downbeat.labels" -}}
{{ include "downbeat.selector" . }}
app.kubernetes.io/part-of: downbeat
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "downbeat.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "downbeat.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "downbeat.claim" -}}
{{- .Values.models.claim.name | default (printf "%s-models" (include "downbeat.name" .)) }}
{{- end }}

{{- /* The Secret that the processes of a cluster prove to each other. The user makes it. */}}
{{- define "downbeat.clusterSecret" -}}
{{- .Values.clusterSecret | default (printf "%s-cluster" (include "downbeat.name" .)) }}
{{- end }}

{{- /* The list that all roles of a cluster are told: one name for each replica of the StatefulSet. */}}
{{- define "downbeat.schedulers" -}}
{{- $name := printf "%s-scheduler" (include "downbeat.name" .) }}
{{- $all := list }}
{{- range $rank := until (int .Values.scheduler.replicas) }}{{ $all = append $all (printf "%s-%d.%s:8003" $name $rank $name) }}{{ end }}
{{- join "," $all }}
{{- end }}

{{- /* The flags of a role, from its own list. */}}
{{- define "downbeat.args" -}}
- {{ .role }}
- --host=0.0.0.0
- --health-port=8005
{{- if ne .role "serve" }}
- --schedulers={{ include "downbeat.schedulers" .root }}
- --cluster-secret=/cluster/secret
{{- end }}
{{- if has .role (list "scheduler" "backend") }}
- --grpc-port=off
{{- end }}
{{- if .models }}
{{- if .root.Values.gpu.enabled }}
- --engine=cuda
{{- else if eq .role "backend" }}
- --devices=1
{{- end }}
{{- if .root.Values.config }}
- --config=/config/downbeat.toml
{{- end }}
{{- end }}
{{- if and .models .root.Values.models.url }}
- --model-cache=/models
{{- end }}
{{- range .own.args }}
- {{ . | quote }}
{{- end }}
{{- if .models }}
- {{ .root.Values.models.url | default "/models" | quote }}
{{- end }}
{{- end }}

{{- define "downbeat.ports" -}}
- { name: http, containerPort: 8000 }
{{- if has .role (list "serve" "frontend") }}
- { name: grpc, containerPort: 8001 }
{{- end }}
- { name: metrics, containerPort: 8002 }
- { name: health, containerPort: 8005 }
{{- if eq .role "scheduler" }}
- { name: schedulers, containerPort: 8003 }
{{- else if eq .role "frontend" }}
- { name: backends, containerPort: 8004 }
{{- end }}
{{- end }}

{{- define "downbeat.env" -}}
{{- $values := .root.Values }}
{{- if eq .role "scheduler" }}
- name: DOWNBEAT_RANK
  valueFrom: { fieldRef: { fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']" } }
{{- end }}
{{- if and .models $values.env }}
{{ toYaml $values.env }}
{{- end }}
{{- end }}

{{- /* What the container is given: GPUs come on top of the role's own resources. */}}
{{- define "downbeat.resources" -}}
{{- $resources := deepCopy .own.resources }}
{{- if and .models .root.Values.gpu.enabled }}
{{- $_ := set $resources "limits" (merge (dict .root.Values.gpu.resource .root.Values.gpu.count) ($resources.limits | default dict)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "downbeat.volumes" -}}
{{- $values := .root.Values }}
- { name: tmp, emptyDir: {} }
- { name: profiles, emptyDir: {} }
{{- if ne .role "serve" }}
- { name: cluster, secret: { secretName: {{ include "downbeat.clusterSecret" .root }}, defaultMode: 0440 } }
{{- end }}
{{- if .models }}
{{- if $values.models.url }}
- { name: models, emptyDir: { sizeLimit: {{ $values.models.cacheSize }} } }
{{- else }}
- { name: models, persistentVolumeClaim: { claimName: {{ include "downbeat.claim" .root }}, readOnly: true } }
{{- end }}
{{- if $values.config }}
- { name: config, configMap: { name: {{ include "downbeat.name" .root }}-config } }
{{- end }}
{{- with $values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "downbeat.mounts" -}}
{{- $values := .root.Values }}
- { name: tmp, mountPath: /tmp }
- { name: profiles, mountPath: /profiles }
{{- if ne .role "serve" }}
- { name: cluster, mountPath: /cluster, readOnly: true }
{{- end }}
{{- if .models }}
- { name: models, mountPath: /models{{ if not $values.models.url }}, readOnly: true{{ end }} }
{{- if $values.config }}
- { name: config, mountPath: /config, readOnly: true }
{{- end }}
{{- with $values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "downbeat.container" -}}
{{- $values := .root.Values }}
name: downbeat
image: "{{ $values.image.repository }}:{{ $values.image.tag | default (printf "%s%s" .root.Chart.AppVersion (ternary "-cuda" "" (and .models $values.gpu.enabled))) }}"
imagePullPolicy: {{ $values.image.pullPolicy }}
args:
  {{- include "downbeat.args" . | nindent 2 }}
{{- with include "downbeat.env" . | trim }}
env:
  {{- . | nindent 2 }}
{{- end }}
{{- if and .models (or $values.envFrom $values.models.secret) }}
envFrom:
  {{- with $values.models.secret }}
  - secretRef: { name: {{ . }} }
  {{- end }}
  {{- with $values.envFrom }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
ports:
  {{- include "downbeat.ports" . | nindent 2 }}
# Until the ports are open, which they are after a download; while models are loaded the process is live and not ready.
startupProbe: { httpGet: { path: /v2/health/live, port: health }, periodSeconds: 2, failureThreshold: {{ if and .models $values.models.url }}{{ div (add $values.models.downloadSeconds 1) 2 }}{{ else }}60{{ end }} }
livenessProbe: { httpGet: { path: /v2/health/live, port: health }, periodSeconds: 10, failureThreshold: 3 }
readinessProbe: { httpGet: { path: /v2/health/ready, port: health }, periodSeconds: 5 }
resources:
  {{- include "downbeat.resources" . | nindent 2 }}
securityContext: { allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: { drop: [ALL] } }
volumeMounts:
  {{- include "downbeat.mounts" . | nindent 2 }}
{{- end }}

{{- define "downbeat.annotations" -}}
{{- $values := .root.Values }}
{{- if not $values.podMonitor.enabled }}
prometheus.io/scrape: "true"
prometheus.io/port: "8002"
{{- end }}
{{- if and .models $values.config }}
# A changed configuration starts new pods.
checksum/config: {{ $values.config | sha256sum }}
{{- end }}
{{- with $values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "downbeat.pod" -}}
{{- $values := .root.Values }}
metadata:
  labels:
    {{- include "downbeat.selector" . | nindent 4 }}
    app.kubernetes.io/part-of: downbeat
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with include "downbeat.annotations" . | trim }}
  annotations:
    {{- . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "downbeat.serviceAccount" .root }}
  automountServiceAccountToken: false
  # Kubernetes' variables for services begin with DOWNBEAT_, as options do.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
  securityContext: { runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, seccompProfile: { type: RuntimeDefault } }
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .own.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $tolerations := .own.tolerations }}
  {{- if and .models $values.gpu.enabled }}
  {{- $tolerations = append $tolerations (dict "key" $values.gpu.resource "operator" "Exists" "effect" "NoSchedule") }}
  {{- end }}
  {{- with $tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if eq .role "scheduler" }}
  # A spare on the same machine is none.
  affinity:
    podAntiAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "downbeat.selector" . | nindent 14 }}
  {{- else }}
  {{- with .own.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "downbeat.selector" . | nindent 10 }}
  {{- end }}
  containers:
    - {{ include "downbeat.container" . | trim | nindent 6 | trim }}
  volumes:
    {{- include "downbeat.volumes" . | nindent 4 }}
{{- end }}

{{- /* The fewest pods that a role ever has. */}}
{{- define "downbeat.fewest" -}}
{{- $scaling := .own.autoscaling | default dict }}
{{- if or $scaling.enabled (has ($scaling.kind | default "none") (list "keda" "hpa")) }}{{ $scaling.minReplicas }}{{ else }}{{ .own.replicas }}{{ end }}
{{- end }}

{{- define "downbeat.deployment" -}}
{{- $scaling := .own.autoscaling }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "downbeat.role" . }}
  labels:
    {{- include "downbeat.labels" . | nindent 4 }}
spec:
  {{- if not (or $scaling.enabled (has ($scaling.kind | default "none") (list "keda" "hpa"))) }}
  replicas: {{ .own.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "downbeat.selector" . | nindent 6 }}
  {{- if and .models .root.Values.gpu.enabled }}
  # No GPU has to be free for a rollout.
  strategy: { rollingUpdate: { maxUnavailable: 1, maxSurge: 0 } }
  {{- else }}
  strategy: { rollingUpdate: { maxUnavailable: 0, maxSurge: 1 } }
  {{- end }}
  template:
    {{- include "downbeat.pod" . | trim | nindent 4 }}
{{- end }}

{{- define "downbeat.budget" -}}
{{- if and .root.Values.podDisruptionBudget.enabled (gt (int (include "downbeat.fewest" .)) 1) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "downbeat.role" . }}
  labels:
    {{- include "downbeat.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "downbeat.selector" . | nindent 6 }}
{{- end }}
{{- end }}

{{- define "downbeat.cpuScaler" -}}
{{- if .own.autoscaling.enabled }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "downbeat.role" . }}
  labels:
    {{- include "downbeat.labels" . | nindent 4 }}
spec:
  scaleTargetRef: { apiVersion: apps/v1, kind: Deployment, name: {{ include "downbeat.role" . }} }
  minReplicas: {{ .own.autoscaling.minReplicas }}
  maxReplicas: {{ .own.autoscaling.maxReplicas }}
  metrics:
    - { type: Resource, resource: { name: cpu, target: { type: Utilization, averageUtilization: {{ .own.autoscaling.cpuPercent }} } } }
{{- end }}
{{- end }}

{{- /* The Service that clients ask. */}}
{{- define "downbeat.clientService" -}}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ include "downbeat.role" . }}
  labels:
    {{- include "downbeat.labels" . | nindent 4 }}
  {{- with .root.Values.service.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ .root.Values.service.type }}
  selector:
    {{- include "downbeat.selector" . | nindent 4 }}
  ports:
    - { name: http, port: 8000, targetPort: http }
    - { name: grpc, port: 8001, targetPort: grpc }
    - { name: metrics, port: 8002, targetPort: metrics }
{{- end }}
