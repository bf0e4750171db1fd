# cgcompile serve for NVIDIA GPUs: `make wheel && docker build -f examples/deploy/gpu.Dockerfile -t cgserve:gpu .`
# No CUDA toolkit and no torch: the container engine's NVIDIA runtime brings the driver's library (`docker run --gpus all`).
FROM python:3.12-slim
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute
COPY dist/*.whl /tmp/
RUN pip install --no-cache-dir --no-compile /tmp/cgbundle-*.whl "$(echo /tmp/cgcompile-*.whl)[serve,grammar,grpc]" && rm /tmp/*.whl
RUN useradd --system --uid 10001 cgserve
USER 10001
# A model's folder is <name>/<version>/model.cgb: mount it, or COPY it into an image of your own.
VOLUME /models
EXPOSE 8000 8001
HEALTHCHECK CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://localhost:8000/v2/health/live', timeout=3)"]
ENTRYPOINT ["cgcompile", "serve", "--host", "0.0.0.0", "--port", "8000", "--grpc-port", "8001", "--log", "json"]
CMD ["/models"]
