"""A folder of made rows knows what it was made with."""

import pytest

from agentjax.config import ConfigError
from agentjax.data.errors import DataError
from agentjax.data.synthesis_folder import SETTINGS, claim


def test_a_folder_holds_the_rows_of_one_setting(tmp_path):
  folder = claim(tmp_path / "made", {"seed": 1}, ("rows.jsonl",))
  assert claim(folder, {"seed": 1}, ("rows.jsonl",)) == folder
  with pytest.raises(ConfigError, match=r"seed is 2 here and 1 there"):
    claim(folder, {"seed": 2}, ("rows.jsonl",))
  (tmp_path / "rows.jsonl").write_text("{}\n")
  with pytest.raises(ConfigError, match="holds other files"):
    claim(tmp_path, {"seed": 1}, ("rows.jsonl",))


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"null", b"\xff"], ids=str)
def test_damaged_settings_are_refused_by_their_name_and_stay_as_they_are(tmp_path, damage):
  folder = claim(tmp_path / "made", {"seed": 1}, ("rows.jsonl",))
  (folder / SETTINGS).write_bytes(damage)
  with pytest.raises(DataError, match=r"settings\.json.*is damaged"):
    claim(folder, {"seed": 1}, ("rows.jsonl",))
  assert (folder / SETTINGS).read_bytes() == damage
