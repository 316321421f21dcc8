"""What pictures of figures hold."""

from qwen35_jax.bench import pictures


def test_names_in_a_roofline_are_free_of_each_other(tmp_path, monkeypatch):
    boxes = []
    put = pictures._Names.put

    def watched(self, words, *rest, **options):
        put(self, words, *rest, **options)
        boxes.append((words, self._taken[-1]))

    monkeypatch.setattr(pictures._Names, "put", watched)
    crowd = [pictures.Dot(f"rows{n}@bf16state", 1.4, rate) for n, rate in ((1, 2.0), (2, 2.01), (3, 2.4), (4, 2.9))]
    beside = [pictures.Dot("8x1024", 1.5, 2.4), pictures.Dot("1x8192", 3000.0, 700.0)]
    pictures.draw_roofline(tmp_path / "a.png", "title", {"a": crowd, "b": beside}, tb_s=4.26, tflop_s=780)
    words = [name for name, _ in boxes]
    assert words[2:] == ["rows1, rows2 @bf16state", "rows3 @bf16state", "rows4 @bf16state", "8x1024", "1x8192"]
    for at, (name, box) in enumerate(boxes):
        for other, box2 in boxes[:at]:
            apart = box[0] >= box2[2] or box2[0] >= box[2] or box[1] >= box2[3] or box2[1] >= box[3]
            assert apart, (name, other)


def test_a_step_is_a_bar_of_its_groups():
    parts = {"in_proj": 2.0, "down": 2.0, "gdn_decode": 1.0}
    bar = pictures.step_bar("decode/4b/rows8", 8.0, parts, 1.0, 4.0)
    assert {group: share for group, share in bar.shares.items() if share} == {"GEMMs": 50, "GDN": 12.5, "idle": 12.5}
    assert bar.floor == 50 and bar.label == "decode rows8\n8.00 ms"
    above = pictures.step_bar("decode/4b/rows8", 8.0, parts, -1.0, None)
    assert above.shares["idle"] == 0 and above.floor is None
    assert "idle" not in pictures.step_bar("decode/4b/rows8", 8.0, parts, None, None).shares
    assert pictures.step_bar("decode/4b/rows8", 8.0, {}, None, None).shares == {pictures.NOT_PROFILED: 100}


def test_bars_leave_out_what_is_not_there(tmp_path):
    pictures.draw_bars(
        tmp_path / "a" / "b.png", "title", "unit", {"x": {"ours": 1.0, "floor": 2.0}, "y": {"ours": 3.0}}
    )
    assert (tmp_path / "a" / "b.png").stat().st_size > 5000
