# Downbeat in a container, for compose.yaml and the chart in deploy/helm: no root, and nothing written but /tmp and /profiles.
FROM rust:1.95-slim-trixie AS build
WORKDIR /src
COPY . .
# Optional parts of the program, such as ucx,retraining. UCX needs libucx0 in the last image, too.
ARG FEATURES=
RUN cargo build --profile dist --locked -p downbeat --features "$FEATURES" && tools/split_debug.sh target/dist/downbeat

# `docker build --target debug --output . .` writes downbeat.debug. Mounted beside the program, it gives backtraces their lines.
FROM scratch AS debug
COPY --from=build /src/target/dist/downbeat.debug /

# Libraries of an engine: none, cpu (onnxruntime) or cuda (onnxruntime, CUDA and cuDNN; more than 1 GB).
FROM debian:trixie-slim AS engine
ARG ENGINE=none
ENV XDG_CACHE_HOME=/opt/engine
COPY --from=build /src/target/dist/downbeat /usr/local/bin/downbeat
RUN mkdir /opt/engine && case "$ENGINE" in \
      none) exit 0 ;; \
      cpu) flags="" ;; \
      cuda) flags="--cuda --cuda-libraries always" ;; \
      *) echo "ENGINE is $ENGINE; it may be none, cpu or cuda" >&2; exit 1 ;; \
    esac && apt-get update && apt-get install -y --no-install-recommends python3-pip && downbeat engine install $flags

FROM debian:trixie-slim
COPY --from=engine /opt/engine /opt/engine
COPY --from=build /src/target/dist/downbeat /usr/local/bin/downbeat
RUN useradd --uid 10001 --no-create-home downbeat && install -d -o downbeat /profiles
# Where engines are looked for; profiles have a folder of their own. The ports are for other containers and machines:
# the default, 127.0.0.1, is the container itself. This is --host 0.0.0.0 of every role.
ENV XDG_CACHE_HOME=/opt/engine DOWNBEAT_PROFILE_CACHE=/profiles DOWNBEAT_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000 8001 8002 8003 8004
ENTRYPOINT ["downbeat"]
