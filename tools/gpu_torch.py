#!/usr/bin/env python3
"""PyTorch, for `gpu_measure throughput --beside 'python3 tools/gpu_torch.py [--half] [--eager | --compiled FOLDER]'`.

Reads lines of `MODEL BATCH RUNS` and answers each with a line of JSON: {"ms": [...]} or {"error": "..."}; first it says {"name": ...}. The models are those of
tools/zoo.py, with random weights: torchvision's ResNet-50, ResNet-152 and VGG19, their BatchNorm folded into the convolutions as in those and in `channels_last`,
and transformers' BertModel in the sizes of BERT-base and large. A run is what Downbeat's is with its inputs in the ring: the model, and the output to pinned host
memory, from inputs on the device. The model is a CUDA graph, one for each (model, batch size), or with --eager its kernels one by one.

With --compiled it is compiled by `torch.compile` before it is recorded: mode `max-autotune`, of which the graph is made here. That takes a minute or more for each
(model, batch size), so --ahead does it before, within --seconds; what is not in FOLDER then is an error.
"""
import argparse
import json
import os
import pathlib
import sys
import threading
import time

LENGTH = 128
BERT = {"bert": (768, 12, 3072, 12), "bertlarge": (1024, 16, 4096, 24)}


def say(**answer):
    print(json.dumps(answer), flush=True)


class Runner:
    def __init__(self, half, eager=False, compiled=None):
        # Read when torch is imported.
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(compiled), "TRITON_CACHE_DIR": f"{compiled}/triton"} if compiled else {}
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        self.torch, self.dtype, self.eager, self.compiled = torch, torch.float16 if half else torch.float32, eager, compiled
        # As onnxruntime's CUDA provider by default.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        self.precision = "FP16" if half else "TF32"
        how = "kernel by kernel" if eager else "max-autotune, CUDA graph" if compiled else "CUDA graph"
        self.name = f"PyTorch {torch.__version__}, {how}, {self.precision}"
        self.models, self.ready = {}, {}

    def model(self, name):
        if name not in self.models:
            self.models.clear()
            self.ready.clear()
            self.torch.cuda.empty_cache()
            self.models[name] = self.made(name)
        return self.models[name]

    def made(self, name):
        if name in BERT:
            from transformers import BertConfig, BertModel

            width, heads, inner, layers = BERT[name]
            model = BertModel(BertConfig(hidden_size=width, num_attention_heads=heads, intermediate_size=inner,
                                         num_hidden_layers=layers), add_pooling_layer=False)
            return model.eval().to("cuda", self.dtype)
        import torchvision
        from torch.fx.experimental.optimization import fuse

        model = fuse(getattr(torchvision.models, name)(weights=None).eval())
        return model.to("cuda", self.dtype, memory_format=self.torch.channels_last)

    def mark(self, name, batch):
        """The file that says that this was compiled."""
        return pathlib.Path(self.compiled, f"{name}-{batch}-{self.precision}.compiled")

    def prepare(self, name, batch, ahead=False):
        """Returns the work of one run, its output, and the place where the output is copied."""
        torch, model = self.torch, self.model(name)
        if (name, batch) in self.ready:
            return self.ready[name, batch]
        if self.compiled:
            if not ahead and not self.mark(name, batch).exists():
                raise RuntimeError("torch.compile was not done with it in the time that it had")
            model = torch.compile(model, mode="max-autotune-no-cudagraphs", dynamic=False)
        if name in BERT:
            inputs = {"input_ids": torch.randint(0, 1000, (batch, LENGTH), device="cuda"),
                      "attention_mask": torch.ones((batch, LENGTH), dtype=torch.int64, device="cuda")}
            forward = lambda: model(**inputs)[0]
        else:
            x = torch.rand((batch, 3, 224, 224), device="cuda", dtype=self.dtype) * 2 - 1
            x = x.contiguous(memory_format=torch.channels_last)
            forward = lambda: model(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                output = forward()
        torch.cuda.current_stream().wait_stream(stream)
        enqueue = forward
        if not self.eager:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                recorded = forward()

            def enqueue():
                graph.replay()
                return recorded
        self.ready[name, batch] = enqueue, torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        return self.ready[name, batch]

    def runs(self, name, batch, runs):
        with self.torch.inference_mode():
            enqueue, host = self.prepare(name, batch)
            millis = []
            for _ in range(runs):
                begin = time.perf_counter()
                host.copy_(enqueue(), non_blocking=True)
                self.torch.cuda.current_stream().synchronize()
                millis.append(1e3 * (time.perf_counter() - begin))
            return millis


def ahead(compiled, wanted, seconds):
    """Compiles what is wanted, `MODEL:BATCH`, in FP16 and then in TF32, as far as the time goes."""
    compiled.mkdir(parents=True, exist_ok=True)
    # A compilation cannot be asked to stop.
    timer = threading.Timer(seconds, lambda: (print(f"its {seconds:.0f} s are over", flush=True), os._exit(0)))
    timer.daemon = True
    timer.start()
    begin = time.monotonic()
    for half in (True, False):
        runner = Runner(half, compiled=compiled)
        for name, _, batch in (word.partition(":") for word in wanted):
            try:
                with runner.torch.inference_mode():
                    runner.prepare(name, int(batch), ahead=True)
                runner.mark(name, batch).touch()
                print(f"{name} {batch} {runner.precision}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
            except Exception as error:  # the next may go well
                print(f"{name} {batch} {runner.precision}: {type(error).__name__}: {error}", flush=True)
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", action="store_true", help="FP16; else FP32 with TF32")
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--compiled", type=pathlib.Path, metavar="FOLDER", help="as torch.compile makes it")
    parser.add_argument("--ahead", nargs="+", metavar="MODEL:BATCH", help="compile these for FOLDER, in FP16 and TF32, and end")
    parser.add_argument("--seconds", type=float, default=150, help="time for that")
    arguments = parser.parse_args()
    try:
        if arguments.ahead:
            ahead(arguments.compiled, arguments.ahead, arguments.seconds)
        runner = Runner(arguments.half, arguments.eager, arguments.compiled)
    except (ImportError, RuntimeError) as error:
        say(error=f"no PyTorch with a GPU: {error}")
        return
    say(name=runner.name)
    for line in sys.stdin:
        try:
            name, batch, runs = line.split()
            say(ms=runner.runs(name, int(batch), int(runs)))
        except Exception as error:  # any error: the next question may go well
            say(error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


if __name__ == "__main__":
    main()
