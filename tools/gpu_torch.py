#!/usr/bin/env python3
"""PyTorch with CUDA graphs, for `gpu_measure throughput --beside 'python3 tools/gpu_torch.py [--half]'`.

Reads lines of `MODEL BATCH RUNS` and answers each with a line of JSON: {"ms": [...]} or {"error": "..."}; first it says {"name": ...}. The models are those of
tools/zoo.py, with random weights: torchvision's ResNet-50, ResNet-152 and VGG19, transformers' BertModel in the sizes of BERT-base and large. One graph for each
(model, batch size). A run is what Downbeat's is with its inputs in the ring: the graph, and the output to pinned host memory, from inputs on the device.
"""
import argparse
import json
import sys
import time

LENGTH = 128
BERT = {"bert": (768, 12, 3072, 12), "bertlarge": (1024, 16, 4096, 24)}


def say(**answer):
    print(json.dumps(answer), flush=True)


class Runner:
    def __init__(self, half):
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        self.torch, self.dtype = torch, torch.float16 if half else torch.float32
        # As onnxruntime's CUDA provider by default.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        self.models, self.graphs = {}, {}

    def model(self, name):
        if name not in self.models:
            self.models.clear()
            self.graphs.clear()
            self.torch.cuda.empty_cache()
            self.models[name] = self.made(name).eval().to("cuda", self.dtype)
        return self.models[name]

    @staticmethod
    def made(name):
        if name in BERT:
            from transformers import BertConfig, BertModel

            width, heads, inner, layers = BERT[name]
            return BertModel(BertConfig(hidden_size=width, num_attention_heads=heads, intermediate_size=inner,
                                        num_hidden_layers=layers), add_pooling_layer=False)
        import torchvision

        return getattr(torchvision.models, name)(weights=None)

    def graph(self, name, batch):
        torch, model = self.torch, self.model(name)
        if (name, batch) not in self.graphs:
            if name in BERT:
                inputs = {"input_ids": torch.randint(0, 1000, (batch, LENGTH), device="cuda"),
                          "attention_mask": torch.ones((batch, LENGTH), dtype=torch.int64, device="cuda")}
                forward = lambda: model(**inputs)[0]
            else:
                x = torch.rand((batch, 3, 224, 224), device="cuda", dtype=self.dtype) * 2 - 1
                forward = lambda: model(x)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    forward()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = forward()
            self.graphs[name, batch] = graph, output, torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        return self.graphs[name, batch]

    def runs(self, name, batch, runs):
        with self.torch.inference_mode():
            graph, output, host = self.graph(name, batch)
            millis = []
            for _ in range(runs):
                begin = time.perf_counter()
                graph.replay()
                host.copy_(output, non_blocking=True)
                self.torch.cuda.current_stream().synchronize()
                millis.append(1e3 * (time.perf_counter() - begin))
            return millis


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", action="store_true", help="FP16; else FP32 with TF32")
    half = parser.parse_args().half
    try:
        runner = Runner(half)
    except (ImportError, RuntimeError) as error:
        say(error=f"no PyTorch with a GPU: {error}")
        return
    say(name=f"PyTorch {runner.torch.__version__}, CUDA graph, {'FP16' if half else 'TF32'}")
    for line in sys.stdin:
        try:
            name, batch, runs = line.split()
            say(ms=runner.runs(name, int(batch), int(runs)))
        except Exception as error:  # whatever it is: the next question may go well
            say(error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


if __name__ == "__main__":
    main()
