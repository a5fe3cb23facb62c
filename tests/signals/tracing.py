"""Shows that a signal stays on the mesh: it runs on tracers, which the host cannot hold."""

import jax


def trace(function, batch):
  """Shapes and dtypes of the arrays that ``function`` gives by name for a batch, as one program.

  Reading an array of the program on the host fails, and an array made on the host is refused.
  """

  def program(given):
    made = dict(function(given))
    on_host = [name for name, value in made.items() if not isinstance(value, jax.core.Tracer)]
    assert not on_host, on_host
    return made

  return jax.eval_shape(program, batch)
