from gridpath import areas, cells, distance, neighbours, parse, path, region

SPLIT = ["..#.", "..#.", "###.", "...."]


def test_parse():
  assert parse("\n ..#\n #..\n") == ["..#", "#.."]


def test_parse_refuses_ragged_rows():
  raised = False
  try:
    parse("..\n...")
  except ValueError:
    raised = True
  assert raised


def test_cells():
  assert cells(["..#", "#.#"]) == [(0, 0), (0, 1), (1, 1)]
  assert cells(["..#", "#.#"], "#") == [(0, 2), (1, 0), (1, 2)]


def test_neighbours_in_the_middle():
  assert neighbours(["...", "...", "..."], (1, 1)) == [(0, 1), (1, 2), (2, 1), (1, 0)]


def test_neighbours_at_edges():
  assert neighbours(["...", "...", "..."], (2, 2)) == [(1, 2), (2, 1)]
  assert neighbours(["...", "...", "..."], (0, 2)) == [(1, 2), (0, 1)]
  assert neighbours(["...", ".#."], (0, 1)) == [(0, 2), (0, 0)]


def test_distance():
  assert distance(SPLIT, (0, 3), (3, 0)) == 6
  assert distance(SPLIT, (0, 0), (1, 1)) == 2
  assert distance(SPLIT, (0, 0), (0, 0)) == 0


def test_distance_without_a_way():
  assert distance(SPLIT, (0, 0), (0, 3)) == -1


def test_path():
  assert path(SPLIT, (2, 3), (3, 1)) == [(2, 3), (3, 3), (3, 2), (3, 1)]
  assert path(SPLIT, (0, 0), (0, 0)) == [(0, 0)]


def test_path_without_a_way():
  assert path(SPLIT, (1, 1), (3, 3)) == []


def test_path_goes_straight():
  assert path(["....."], (0, 4), (0, 1)) == [(0, 4), (0, 3), (0, 2), (0, 1)]


def test_region():
  assert region(SPLIT, (0, 1)) == 4
  assert region(SPLIT, (3, 3)) == 7


def test_areas():
  assert areas(SPLIT) == [7, 4]
  assert areas(["##", "##"]) == []
  assert areas([".#.", "#.#", ".#."]) == [1, 1, 1, 1, 1]
