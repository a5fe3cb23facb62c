import copy
import gzip
import json
import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.recipes.mm_webagent.brief import read_brief
from agentjax.recipes.mm_webagent.page import build_page
from agentjax.recipes.mm_webagent.plan import PlanError, plan_faults, plan_json, read_plan
from agentjax.recipes.mm_webagent.planner import plan_request
from tests.recipes.mm_webagent.pages import PLAN, plan_values


def test_a_valid_plan_is_read_and_written_alike():
  assert plan_faults(plan_values()) == ()
  assert read_plan(plan_json(PLAN)) == PLAN
  assert [asset.kind for asset in PLAN.assets] == ["image", "video", "chart"]


def _set(path, value):
  def change(values):
    *inner, last = path
    for name in inner:
      values = values[name]
    values[last] = value

  return change


@pytest.mark.parametrize(
  ("change", "fault"),
  [
    (_set(["image_generation", 0, "save_path"], "assets/other.png"), "layout names assets/hero"),
    (_set(["image_generation", 0, "save_path"], "assets/film.mp4"), "allowed: assets/NAME.png"),
    (_set(["image_generation", 0, "save_path"], "assets/../hero.png"), "allowed: assets/NAME.png"),
    (_set(["image_generation", 0, "save_path"], "/etc/hero.png"), "allowed: assets/NAME.png"),
    (_set(["image_generation", 0, "save_path"], "http://a.b/x.png"), "allowed: assets/NAME.png"),
    (_set(["image_generation", 0, "size"], "640x480"), "image_generation[0].size='640x480'"),
    (_set(["video_generation", 0, "seconds"], "5"), "allowed: 4, 8, 12"),
    (_set(["data_visualization", 0, "source_data"], ""), "data_visualization[0].source_data=''"),
    (_set(["video_generation", 0, "context"], {}), "video_generation[0].context.section"),
    (_set(["image_generation", 0, "compiled_attributes", "lighting"], 3), "lighting=3"),
    (_set(["image_generation"], []), "no list saves it"),
    (_set(["image_generation"], {}), "image_generation is a dict"),
    (_set(["code_generation"], []), "list of one object"),
    (_set(["code_generation", 0, "prompt"], "Nothing."), "the layout does not name it"),
    (_set(["code_generation", 0, "prompt"], " "), "code_generation[0].prompt"),
    (_set(["audio_generation"], []), "'audio_generation' is no part"),
  ],
)
def test_a_fault_is_told_with_its_field(change, fault):
  values = copy.deepcopy(plan_values())
  change(values)
  faults = plan_faults(values)
  assert any(fault in one for one in faults), faults
  with pytest.raises(PlanError, match="cannot be used"):
    read_plan(values)


def test_an_asset_that_is_saved_twice_is_a_fault():
  values = plan_values()
  values["image_generation"] *= 2
  assert plan_faults(values) == ("assets/hero.png is saved twice.",)


def test_all_faults_are_told_at_once():
  values = plan_values()
  values["image_generation"][0]["size"] = values["video_generation"][0]["seconds"] = "x"
  assert len(plan_faults(values)) == 2


_JSON = st.recursive(
  st.none() | st.booleans() | st.floats() | st.text(max_size=8),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(
      st.sampled_from(["code_generation", "image_generation", "prompt", "size"]), inner, max_size=3
    )
  ),
  max_leaves=12,
)


@given(_JSON)
def test_no_json_breaks_the_validator(values):
  assert plan_faults(values)


def test_the_requests_of_the_benchmark_get_plans_that_are_valid():
  folder = os.environ.get("AGENTJAX_DATA")
  path = pathlib.Path(folder or "", "mm_webagent", "evaluation_dataset.jsonl.gz")
  if not folder or not path.exists():
    pytest.skip("AGENTJAX_DATA has no mm_webagent")
  with gzip.open(path, "rt") as lines:
    requests = [json.loads(line)["input"] for line in lines][::10]
  for request in requests:
    brief = read_brief(request)
    plan = plan_request(brief)
    assert plan_faults(plan_json(plan)) == () and len(brief.texts) > 10
    page = build_page(plan)
    assert all(f"src='{asset.path}'" in page for asset in plan.assets)


def test_texts_of_a_plan_are_escaped_in_its_page():
  values = plan_values()
  values["code_generation"][0]["prompt"] += "\nSection x: “<script>alert(1)</script>”"
  page = build_page(read_plan(values))
  assert "<script" not in page and "&lt;script&gt;" in page
