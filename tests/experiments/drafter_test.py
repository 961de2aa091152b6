"""The figure of a drafter: which arms it compares, and a model that is there is not trained again."""

from unittest import mock

from configs import fig_drafter
from experiments import drafter, figures
from tests.experiments import made


def test_the_page_compares_the_arms_of_the_config(monkeypatch, tmp_path):
    ends = {"none": 1.0, "frozen": 0.2, "distilled": 0.6, "measured": 0.7}
    assert list(ends) == list(fig_drafter.sweep())
    runs = [
        made.run(arm, seed, rollout__draft_acceptance=[0.5] * 10 + [x] * 2,
                 time__rollout_tokens_per_s=100 * x + seed)
        for arm, x in ends.items() for seed in (0, 1)
    ]
    text = drafter.FIGURE.text(figures.records.by_arm(runs))
    assert "| distilled | 2 | 0.500" in text and "distilled − frozen | +0.400 [+0.400, +0.400]" in text
    assert "| tokens per second | measured − none | -30.000 [-30.000, -30.000] |" in text
    monkeypatch.setattr(fig_drafter, "FOLDER", str(tmp_path))
    with mock.patch.object(drafter.subprocess, "run") as ran:
        drafter.main([])
        assert not ran.called
        monkeypatch.setattr(fig_drafter, "FOLDER", str(tmp_path / "new"))
        drafter.main([])
    trained, exported = (call.args[0] for call in ran.call_args_list)
    assert "--config.model.num_layers=1" in trained and exported[-2] == str(tmp_path / "new")
