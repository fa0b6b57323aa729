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

{{- /* The Secret with the certificate of the ports; empty: the ports speak no TLS. */}}
{{- define "downbeat.tlsSecret" -}}
{{- $tls := .Values.tls }}
{{- if or $tls.secret $tls.issuer.name }}{{ $tls.secret | default (printf "%s-tls" (include "downbeat.name" .)) }}{{ end }}
{{- end }}

{{- /* The roles of this mode, in JSON. */}}
{{- define "downbeat.roles" -}}
{{- ternary (list "serve") (list "frontend" "scheduler" "backend") (eq .Values.mode "single") | toJson }}
{{- end }}

{{- /* The names in the certificate, in JSON: those of the Services. */}}
{{- define "downbeat.dnsNames" -}}
{{- $names := list }}
{{- range $role := include "downbeat.roles" . | fromJsonArray }}
{{- $name := include "downbeat.role" (dict "root" $ "role" $role) }}
{{- $names = concat $names (list $name (printf "%s.%s" $name $.Release.Namespace) (printf "%s.%s.svc" $name $.Release.Namespace)) }}
{{- end }}
{{- .Values.tls.dnsNames | default $names | toJson }}
{{- end }}

{{- /* The list that all roles of a cluster are told: one name for each replica of the StatefulSet. */}}
{{- define "downbeat.schedulers" -}}
{{- $name := printf "%s-scheduler" (include "downbeat.name" .) }}
{{- $all := list }}
{{- range $rank := until (int .Values.scheduler.replicas) }}{{ $all = append $all (printf "%s-%d.%s:8003" $name $rank $name) }}{{ end }}
{{- join "," $all }}
{{- end }}

{{- /* The flags by which the processes of a cluster find and trust each other. */}}
{{- define "downbeat.clusterArgs" -}}
{{- $etcd := .Values.etcd }}
{{- if $etcd.endpoints }}
- --etcd={{ join "," $etcd.endpoints }}
- --etcd-prefix={{ $etcd.prefix | default (printf "%s/%s" .Release.Namespace (include "downbeat.name" .)) }}
{{- if $etcd.caSecret }}
- --etcd-ca=/etcd/ca.crt
{{- end }}
{{- if $etcd.certificateSecret }}
- --etcd-certificate=/etcd/tls.crt
- --etcd-key=/etcd/tls.key
{{- end }}
{{- if $etcd.user }}
- --etcd-user={{ $etcd.user }}
- --etcd-password=/etcd/password
{{- end }}
{{- else }}
- --schedulers={{ include "downbeat.schedulers" . }}
{{- end }}
- --cluster-secret=/cluster/secret
{{- end }}

{{- /* The flags that lock the ports. */}}
{{- define "downbeat.accessArgs" -}}
{{- if include "downbeat.tlsSecret" . }}
- --tls-certificate=/tls/tls.crt
- --tls-key=/tls/tls.key
{{- if .Values.tls.clientCaSecret }}
- --tls-client-ca=/tls/clients.crt
{{- end }}
{{- end }}
{{- if .Values.apiKeys.secret }}
- --api-keys=/keys/keys.toml
{{- end }}
{{- end }}

{{- /* The flags of a role, from its own list. */}}
{{- define "downbeat.args" -}}
- {{ .role }}
- --host=0.0.0.0
- --health-port=8005
{{- if ne .role "serve" }}
{{- include "downbeat.clusterArgs" .root }}
{{- end }}
{{- include "downbeat.accessArgs" .root }}
{{- if has .role (list "scheduler" "backend") }}
- --grpc-port=off
{{- end }}
{{- if .root.Values.subClusters }}
{{- if eq .role "scheduler" }}
- --sub-clusters={{ .root.Values.subClusters }}
{{- else if eq .role "backend" }}
- --model-control-mode=explicit
{{- end }}
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
{{- if and (eq .role "scheduler") (not $values.etcd.endpoints) }}
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
{{- $etcd := $values.etcd }}
{{- if or $etcd.caSecret $etcd.certificateSecret $etcd.passwordSecret }}
- name: etcd
  projected:
    defaultMode: 0440
    sources:
      {{- with $etcd.caSecret }}
      - secret: { name: {{ . }}, items: [{ key: ca.crt, path: ca.crt }] }
      {{- end }}
      {{- with $etcd.certificateSecret }}
      - secret: { name: {{ . }}, items: [{ key: tls.crt, path: tls.crt }, { key: tls.key, path: tls.key }] }
      {{- end }}
      {{- with $etcd.passwordSecret }}
      - secret: { name: {{ . }}, items: [{ key: password, path: password }] }
      {{- end }}
{{- end }}
{{- end }}
{{- with include "downbeat.tlsSecret" .root }}
- name: tls
  projected:
    defaultMode: 0440
    sources:
      - secret: { name: {{ . }}, items: [{ key: tls.crt, path: tls.crt }, { key: tls.key, path: tls.key }] }
      {{- with $values.tls.clientCaSecret }}
      - secret: { name: {{ . }}, items: [{ key: ca.crt, path: clients.crt }] }
      {{- end }}
{{- end }}
{{- with $values.apiKeys.secret }}
- { name: keys, secret: { secretName: {{ . }}, defaultMode: 0440 } }
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
{{- if or $values.etcd.caSecret $values.etcd.certificateSecret $values.etcd.passwordSecret }}
- { name: etcd, mountPath: /etcd, readOnly: true }
{{- end }}
{{- end }}
{{- if include "downbeat.tlsSecret" .root }}
- { name: tls, mountPath: /tls, readOnly: true }
{{- end }}
{{- if $values.apiKeys.secret }}
- { name: keys, mountPath: /keys, readOnly: true }
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
{{- if include "downbeat.tlsSecret" .root }}
prometheus.io/scheme: https
{{- end }}
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
