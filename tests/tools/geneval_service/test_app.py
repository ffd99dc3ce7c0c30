"""The service around fake models: scores, both wire forms, and what it refuses with which words."""

import json
import pickle
import pickletools

import pytest
from PIL import Image

from tests.tools.geneval_service.bad_pictures import encoded, huge_jpeg, huge_png
from tests.tools.geneval_service.fakes import (
    MaskColorJudge,
    RectangleDetector,
    found,
    rectangles,
)
from tools.geneval_service.app import create_app, make_app
from tools.geneval_service.pipeline import GenevalScorer
from tools.geneval_service.self_check import SelfCheckError
from train.reward_wire import RewardRequest, decode_answer, encode_jpeg, encode_request

RED, BLUE, GREEN = (220, 20, 20), (30, 50, 210), (20, 150, 40)
LEFT, RIGHT = (10, 30, 40, 60), (80, 30, 110, 60)


def cats(count=1, tag="single_object", **keys):
    return {"tag": tag, "include": [{"class": "cat", "count": count, **keys}], "prompt": "p"}


@pytest.fixture
def scorer():
    return GenevalScorer(RectangleDetector(), MaskColorJudge(), batch_size=3)


@pytest.fixture
def client(scorer):
    return make_app(scorer).test_client()


def post(client, images, metas, form="json", only_strict=False):
    data = [image if isinstance(image, bytes) else encode_jpeg(image, 90) for image in images]
    body = encode_request(RewardRequest(data, metas, only_strict), form)
    headers = {"Content-Type": "application/json"} if form == "json" else {}
    return client.post("/", data=body, headers=headers)


def refusal(answer):
    return answer.status_code, answer.get_json()["error"]


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_a_batch_in_both_forms(client, form):
    one, two = rectangles((RED, LEFT)), rectangles((RED, LEFT), (BLUE, RIGHT))
    metas = [cats(color="red", tag="colors"), cats(), cats(2, tag="counting"), cats(2)]
    answer = post(client, [one, two, two, one], metas, form)
    assert answer.status_code == 200
    scores = decode_answer(answer.data, 4)
    assert [s.reward for s in scores] == [1.0, 1.0, 1.0, 0.0]
    assert [s.strict_reward for s in scores] == [1.0, 0.0, 1.0, 0.0]
    assert [s.score for s in scores] == [1.0, 0.0, 1.0, 0.5]
    record = (json.loads if form == "json" else pickle.loads)(answer.data)
    assert record["group_rewards"]["counting"] == [-10.0, -10.0, 1.0, -10.0]
    assert record["group_strict_rewards"]["single_object"] == [-10.0, 0.0, -10.0, 0.0]


def test_only_strict_leaves_the_plain_reward_at_0(client):
    answer = post(client, [rectangles((RED, LEFT))], [cats()], only_strict=True)
    score = decode_answer(answer.data, 1)[0]
    assert (score.score, score.reward, score.strict_reward) == (1.0, 0.0, 1.0)


def test_batches_are_detected_as_batches_and_colored_together(scorer, client):
    scorer.detector.batches.clear()
    scorer.colors.calls.clear()
    picture = rectangles((GREEN, LEFT))
    metas = [cats(color="green"), cats(), cats(color="red"), cats(color="green"), cats()]
    scores = decode_answer(post(client, [picture] * 5, metas).data, 5)
    assert scorer.detector.batches == [3, 2]
    assert scorer.colors.calls == [2, 1]
    assert [s.reward for s in scores] == [1.0, 1.0, 0.0, 1.0, 1.0]


def test_a_position_is_judged(client):
    class Two(RectangleDetector):
        def _detect_one(self, image):
            if image.size == self.photograph_size:
                return super()._detect_one(image)
            return [found("cat", LEFT), found("dog", RIGHT)]

    client = make_app(GenevalScorer(Two(), MaskColorJudge())).test_client()
    for relation, reward in (("right of", 1.0), ("left of", 0.0), ("above", 0.0)):
        meta = cats()
        meta["include"].append({"class": "dog", "count": 1, "position": [relation, 0]})
        assert decode_answer(post(client, [rectangles()], [meta]).data, 1)[0].reward == reward


def test_other_picture_kinds_are_scored(client):
    red = rectangles((RED, LEFT))
    clear = red.convert("RGBA")
    clear.paste((0, 0, 0, 0), RIGHT)  # transparency is white, which is one more rectangle
    images = [
        encoded(red),
        encoded(red.convert("CMYK"), "JPEG"),
        encoded(red.quantize()),
        encoded(clear),
    ]
    metas = [cats(color="red")] * 3 + [cats(2)]
    scores = decode_answer(post(client, images, metas, "pickle").data, 4)
    assert [s.strict_reward for s in scores] == [1.0] * 4


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"not an image", "not a JPEG or PNG"),
        (b"", "not a JPEG or PNG"),
        (huge_png(20000), "too large"),
        (huge_jpeg(rectangles(), 20000), "too large"),
        (encode_jpeg(Image.effect_noise((64, 64), 50).convert("RGB"), 90)[:900], "be decoded"),
        (encoded(rectangles(), "GIF"), "not a JPEG or PNG"),
    ],
)
def test_bad_pictures_are_refused_by_their_number(client, image, message):
    status, error = refusal(post(client, [rectangles(), image], [cats()] * 2))
    assert status == 400 and message in error and "image 1" in error


def unplaced(target):
    return [
        {"class": "cat", "count": 1},
        {"class": "dog", "count": 1, "position": ["above", target]},
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"include": [{"class": "unicorn", "count": 1}]}, "unknown class 'unicorn'"),
        ({"include": [{"class": "cat"}]}, "include[0]: count is None"),
        ({"include": []}, "include is missing or empty"),
        ({"include": "cat"}, "include is 'cat'"),
        ({"include": [{"class": "cat", "count": 10**400, "color": "mauve"}]}, "color 'mauve'"),
        ({"exclude": [{"class": "dog"}]}, "exclude[0]: count is None"),
        ({"include": unplaced(1)}, "position points to 1"),
        ({"include": unplaced(-1)}, "position points to -1"),
        ({"include": unplaced(True)}, "position points to True"),
        ({"tag": "style"}, "unknown tag 'style'"),
        ({"prompt": None}, "prompt is None"),
    ],
)
def test_bad_metadata_are_refused(client, change, message):
    for form in ("json", "pickle"):
        status, error = refusal(post(client, [rectangles()], [{**cats(), **change}], form))
        assert status == 400 and "image 0" in error and message in error


def test_a_refusal_quotes_no_megabytes(client):
    nested = "[" * 30000 + "]" * 30000
    for include in ('"' + "x" * 1_000_000 + '"', nested):
        body = '{"images": [""], "meta_datas": [{"tag": "colors", "prompt": "p", "include": %s}]}'
        answer = client.post("/", data=body % include, content_type="application/json")
        status, error = refusal(answer)
        assert status == 400 and 0 < len(error) < 700


def test_deep_metadata_in_a_pickle_are_refused(client):
    record = {"images": [b""], "meta_datas": [{**cats(), "include": "HERE"}]}
    body = pickletools.optimize(pickle.dumps(record, protocol=3))
    nested = b"]" * 30000 + b"a" * 29999  # empty lists, each then put into the one before
    body = body.replace(b"X\x04\x00\x00\x00HERE", nested)
    answer = client.post("/", data=body, content_type="application/octet-stream")
    assert refusal(answer) == (400, "image 0: metadata are nested too deeply")


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b"x", "application/octet-stream", 400, "not a complete pickle"),
        (b"cos\nsystem\n.", "application/octet-stream", 400, "not plain data"),
        (b'{"images": [], "meta_datas": []}', "application/json", 400, "at least one image"),
        (b"[" * 100_000, "application/json", 400, "JSON"),
        (b"{}", "text/plain", 415, "'text/plain' is not one of"),
    ],
)
def test_bad_bodies_are_refused(client, body, kind, status, message):
    answer = refusal(client.post("/", data=body, content_type=kind))
    assert answer[0] == status and message in answer[1]


def test_too_many_images_and_unknown_lengths_are_refused(client):
    record = {"images": [b"x"] * 257, "meta_datas": [{}] * 257, "only_strict": False}
    assert client.post("/", data=pickle.dumps(record)).status_code == 413
    chunked = client.post("/", data=b"x", headers={"Transfer-Encoding": "chunked"})
    assert chunked.status_code == 411


def test_health_metrics_and_other_pages(client):
    health = client.get("/health").get_json()
    assert health["status"] == "ok" and health["formats"] == ["json", "pickle"]
    assert (health["detector"], health["colors"]) == ("rectangles", "mask")
    post(client, [rectangles()] * 2, [cats()] * 2)
    post(client, [b"x"], [cats()])
    lines = client.get("/metrics").text.splitlines()
    assert 'reward_requests_total{status="200"} 2' in lines
    assert 'reward_requests_total{status="400"} 1' in lines
    assert "reward_images_total 2" in lines
    assert refusal(client.get("/"))[0] == 405 and refusal(client.get("/x"))[0] == 404


def test_a_defect_costs_one_request_only(scorer, client, monkeypatch):
    def broken(images):
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(scorer.detector, "detect", broken)
        status, error = refusal(post(client, [rectangles()], [cats()]))
    assert status == 500 and error == "RuntimeError: boom"
    assert post(client, [rectangles()], [cats()]).status_code == 200


def test_a_detector_that_drops_a_picture_is_a_defect(client, scorer, monkeypatch):
    monkeypatch.setattr(scorer.detector, "detect", lambda images: [[]])
    status, error = refusal(post(client, [rectangles()] * 2, [cats()] * 2))
    assert status == 500 and "1 of 2" in error


def test_workers_add_their_counters_up(scorer, tmp_path, monkeypatch):
    monkeypatch.setenv("R3_REWARD_METRICS_DIR", str(tmp_path))
    client = make_app(scorer).test_client()
    post(client, [rectangles()], [cats()])
    other = {"by_status": [[200, 5], [400, 2]], "num_images": 7, "scoring_s": 1, "num_hang_ups": 3}
    (tmp_path / "1.json").write_text(json.dumps(other))
    lines = client.get("/metrics").text.splitlines()
    assert 'reward_requests_total{status="200"} 6' in lines
    assert 'reward_requests_total{status="400"} 2' in lines
    assert "reward_images_total 8" in lines and "reward_client_hang_ups_total 3" in lines


def test_models_that_do_not_find_the_cat_do_not_serve():
    with pytest.raises(SelfCheckError, match="rectangles does not find the cat"):
        make_app(GenevalScorer(RectangleDetector(finds_the_cat=False), MaskColorJudge()))


def test_models_that_find_everything_do_not_serve():
    class Everything(RectangleDetector):
        def _detect_one(self, image):
            return [found(name, LEFT) for name in ("cat", "airplane", "pizza")]

    with pytest.raises(SelfCheckError, match="expected fewer than 1 airplane"):
        make_app(GenevalScorer(Everything(), MaskColorJudge()))


def test_models_that_confuse_colors_do_not_serve():
    class AlwaysRed(MaskColorJudge):
        def name_colors(self, views):
            return ["red"] * len(views)

    with pytest.raises(SelfCheckError, match="calls red, green, blue red, red, red"):
        make_app(GenevalScorer(RectangleDetector(), AlwaysRed()))


def test_settings_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--detector 'yolo'"):
        create_app("yolo")
    with pytest.raises(ValueError, match="needs --clip-folder FOLDER"):
        create_app("mask2former", str(tmp_path))
    with pytest.raises(ValueError, match="batch size is 0.*--batch-size"):
        GenevalScorer(RectangleDetector(), MaskColorJudge(), batch_size=0)
