"""Models that take pictures and texts, beside Pillow, numpy and Hugging Face's tokenizers."""
import io
import json
import subprocess

import numpy as np
import pytest
import requests
import tokenizers
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from PIL import Image
from tritonclient.utils import InferenceServerException

import wire
from serving import EXAMPLES, Server, cluster

FOLDER = EXAMPLES / "preprocess"
PHOTO = (FOLDER / "photo.jpg").read_bytes()
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
# Of 255, for a JPEG: libjpeg-turbo's rounding of the transform and of colours is its own. PNGs differ by the resize alone.
JPEG_TOLERANCE, PNG_TOLERANCE = 3, 1
TEXTS = ["What a fine day!", "I hate this film", "", "so " * 50]


@pytest.fixture(scope="module", params=["serve", "frontend"])
def server(request, binary, tmp_path_factory):
    """A server of the models, or a frontend to one, which has neither their folder nor their options."""
    folder = tmp_path_factory.mktemp("preprocess")
    flags = ["--config", str(FOLDER / "downbeat.toml"), "--no-profiling"]
    alone = request.param == "serve"
    start = Server(binary, FOLDER / "models", folder, *flags) if alone else cluster(binary, FOLDER / "models", folder, *flags, models=["photo", "sentence"])
    with start as server:
        yield server


@pytest.fixture(params=[httpclient, grpcclient], ids=["http", "grpc"])
def triton(request, server):
    module = request.param
    address = server.http if module is httpclient else server.grpc
    with module.InferenceServerClient(address) as client:
        yield module, client


def encoded(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def as_torchvision(data):
    """`Resize(40)`, `CenterCrop(32)` as torchvision does them on a PIL image: the pixels."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    short, (width, height) = 40, image.size
    size = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    image = image.resize(size, Image.BILINEAR)
    left, top = round((image.width - 32) / 2), round((image.height - 32) / 2)
    return np.asarray(image.crop((left, top, left + 32, top + 32))).astype(np.float64)


def infer(triton, model, name, items, outputs, shape=None):
    module, client = triton
    array = np.array(items, dtype=object).reshape(shape or [len(items)])
    sent = module.InferInput(name, list(array.shape), "BYTES")
    sent.set_data_from_numpy(array)
    answer = client.infer(model, [sent])
    return [answer.as_numpy(output) for output in outputs]


def seen(triton, items, shape=None):
    """The pixels that the model saw, 0 to 255."""
    [as_seen] = infer(triton, "photo", "image", items, ["as_seen"], shape)
    return (as_seen.transpose(0, 2, 3, 1).astype(np.float64) * STD + MEAN) * 255


def test_pictures_are_what_pillow_and_torchvision_make_of_them(triton):
    random = np.random.default_rng(1)
    y, x = np.mgrid[0:97, 0:131]
    smooth = np.stack([x * 255 / 131, y * 255 / 97, 128 + 100 * np.sin(x / 9)], axis=2).astype(np.uint8)
    noise = random.integers(0, 256, (64, 50, 3), dtype=np.uint8)
    smooth, noise = Image.fromarray(smooth), Image.fromarray(noise)
    alpha = smooth.convert("RGBA")
    alpha.putalpha(100)
    jpegs = [PHOTO, encoded(smooth, "JPEG", quality=90), encoded(smooth, "JPEG", quality=90, progressive=True),
             encoded(smooth, "JPEG", quality=90, subsampling=0), encoded(smooth.convert("L"), "JPEG"), encoded(smooth.convert("CMYK"), "JPEG", quality=95)]
    pngs = [encoded(noise, "PNG"), encoded(smooth, "PNG"), encoded(smooth.convert("L"), "PNG"), encoded(alpha, "PNG"),
            encoded(smooth.convert("P"), "PNG")]
    for items, tolerance in [(jpegs, JPEG_TOLERANCE), (pngs, PNG_TOLERANCE)]:
        for shape in [[len(items)], [len(items), 1]]:
            found = seen(triton, items, shape)
            for index, item in enumerate(items):
                off = np.abs(found[index] - as_torchvision(item)).max()
                assert off <= tolerance + 1e-3, (index, off)


def test_exif_orientation_is_passed_over_as_by_image_open(triton):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(Image.open(io.BytesIO(PHOTO)), "JPEG", exif=exif, quality=90)
    assert np.abs(seen(triton, [turned])[0] - as_torchvision(turned)).max() <= JPEG_TOLERANCE + 1e-3


def test_tokens_are_those_of_the_tokenizers_library(triton):
    module, client = triton
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "models/sentence/tokenizer.json"))
    tokenizer.enable_truncation(32)
    tokenizer.enable_padding()
    batch = tokenizer.encode_batch(TEXTS)
    tensors = []
    for name, rows in [("input_ids", [e.ids for e in batch]), ("attention_mask", [e.attention_mask for e in batch])]:
        tensors.append(module.InferInput(name, [len(batch), len(rows[0])], "INT64"))
        tensors[-1].set_data_from_numpy(np.array(rows, np.int64))
    raw = client.infer("sentence", tensors).as_numpy("tone")
    [tone] = infer(triton, "sentence", "text", [text.encode() for text in TEXTS], ["tone"])
    np.testing.assert_allclose(tone, raw, rtol=1e-6)
    assert tone[0].argmax() == 1 and tone[1].argmax() == 0


def test_texts_come_as_json_strings_and_a_picture_as_a_whole_body(server):
    url = f"{server.url}/v2/models"
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": TEXTS[:2]}]}
    answer = requests.post(f"{url}/sentence/infer", json=body).json()
    assert answer["outputs"][0]["shape"] == [2, 2]
    answer = requests.post(f"{url}/photo/infer", data=PHOTO, headers={"Content-Type": "image/jpeg"}).json()
    assert np.argmax(answer["outputs"][0]["data"]) == 2
    answer = requests.post(f"{url}/sentence/infer", data=PHOTO, headers={"Content-Type": "image/jpeg"})
    assert answer.status_code == 400 and "takes no image/jpeg" in answer.json()["error"]


def test_both_forms_are_found_in_metadata_and_configuration(server):
    with httpclient.InferenceServerClient(server.http) as client:
        assert [i["name"] for i in client.get_model_metadata("photo")["inputs"]] == ["pixels"]
        said = {k: v["string_value"] for k, v in client.get_model_config("photo")["parameters"].items()}
    assert said.pop("downbeat_rows").startswith("independent: ")
    assert said == {"preprocess_input": "image", "preprocess_media": "image/jpeg, image/png", "preprocess_fills": "pixels"}
    with grpcclient.InferenceServerClient(server.grpc) as client:
        assert client.get_model_config("sentence").config.parameters["preprocess_input"].string_value == "text"


def test_what_is_wrong_is_said_and_costs_nobody_else(server, triton):
    bomb = bytearray(encoded(Image.new("RGB", (1, 1)), "PNG"))
    bomb[16:24] = (100_000).to_bytes(4, "big") * 2
    short = bytearray(bomb)
    short[16:24] = (8000).to_bytes(4, "big") * 2
    before = server.memory_mib()
    for model, name, items, shape, said in [
        ("photo", "image", [bytes(bomb)], None, "100000 x 100000"),
        ("photo", "image", [bytes(short)], None, "8000 x 8000 pixels take at least"),
        ("photo", "image", [PHOTO, PHOTO[:2000]], None, "item 1 of input 'image'"),
        ("photo", "image", [b""], None, "the picture is empty"),
        ("photo", "image", [b"no picture"], None, "neither a JPEG nor a PNG"),
        ("photo", "image", [PHOTO], [1, 1, 1], "unexpected shape for input 'image'"),
        ("photo", "image", [PHOTO] * 17, None, "batch-size must be <= 16"),
        ("sentence", "text", [b"\xff\xfe"], None, "not UTF-8"),
        ("sentence", "text", [b"a" * 300_000], None, "at most 262144"),
    ]:
        with pytest.raises(InferenceServerException, match=said):
            infer(triton, model, name, items, [], shape)
    assert server.memory_mib() - before < 100, "nothing is allocated for a bomb"
    module, client = triton
    empty = module.InferInput("image", [0], "BYTES")
    empty.set_data_from_numpy(np.array([], dtype=object))
    wrong = module.InferInput("image", [1, 4], "FP32")
    wrong.set_data_from_numpy(np.zeros([1, 4], np.float32))
    for sent in [empty, wrong]:
        with pytest.raises(InferenceServerException):
            client.infer("photo", [sent])
    both = [module.InferInput("image", [1], "BYTES"), module.InferInput("pixels", [1, 3, 32, 32], "FP32")]
    both[0].set_data_from_numpy(np.array([PHOTO], dtype=object))
    both[1].set_data_from_numpy(np.zeros([1, 3, 32, 32], np.float32))
    with pytest.raises(InferenceServerException, match="send one of the two"):
        client.infer("photo", both)
    assert seen(triton, [PHOTO]).shape == (1, 32, 32, 3)


def test_a_picture_is_not_decoded_to_the_end_for_a_client_that_has_left(server):
    bomb = encoded(Image.new("L", (8000, 8000)), "PNG")
    assert len(bomb) < 100_000
    server.leave_during_work(wire.post("/v2/models/photo/infer", bomb, "Content-Type: image/png"))


def test_the_command_line_sends_a_picture_or_a_text(server, binary):
    def run(*args):
        return subprocess.run([binary, "infer", *args, "--url", server.url], capture_output=True, text=True)

    assert "colour: blue" in run("photo", str(FOLDER / "photo.jpg")).stdout
    assert "tone: kind" in run("sentence", "--text", TEXTS[0]).stdout
    assert "takes no texts" in run("photo", "--text", "a text").stderr


def test_steps_that_do_not_fit_keep_the_model_out_and_config_check_says_so(binary, tmp_path):
    file = tmp_path / "downbeat.toml"
    file.write_text('[models.photo]\npreprocess = [{ step = "decode" }, { step = "resize", size = [8, 8] }]\n')
    run = subprocess.run([binary, "config", "check", str(FOLDER / "models"), "--config", str(file)], capture_output=True, text=True,
                         env={"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin"})
    assert run.returncode != 0
    assert "[models.photo] preprocess: the steps give [8, 8, 3]" in run.stdout + run.stderr, json.dumps(run.stdout + run.stderr)
