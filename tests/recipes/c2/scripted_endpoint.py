"""An endpoint that writes C2's rubrics and judges by them."""

import http.server
import json
import re
import threading

GAPS = {"kind": 3.0, "short": 0.5, "loud": -2.0, "long": -4.0}  # what a rubric does to A over B


class Endpoint:
  """Writes rubrics by the seed of a request and judges by their words; remembers requests.

  ``fault(number, body)`` may give (status, values) in the place of an answer.
  """

  def __init__(self):
    self.fault = lambda number, body: None
    self.seen = []
    self._lock = threading.Lock()
    endpoint = self

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with endpoint._lock:
          endpoint.seen.append(body)
          number = len(endpoint.seen)
        status, values = endpoint.fault(number, body) or (200, endpoint.answer(body))
        data = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

      def log_message(self, *args):
        pass

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
    self._thread = threading.Thread(target=self._server.serve_forever)
    self._thread.start()

  def answer(self, body):
    asked = body["messages"][1]["content"]
    if body.get("logprobs"):
      found = re.search(r"Is it (\w+)\?", asked)
      gap = GAPS[found[1]] if found else 0.1
      told = [{"token": " A", "logprob": gap / 2 - 3}, {"token": "B", "logprob": -gap / 2 - 3}]
      return {"choices": [{"logprobs": {"content": [{"top_logprobs": told}]}}]}
    text = "<analyze>so</analyze><answer>A</answer>"
    if "Write a rubric" in asked:
      word = [*GAPS, None][body["seed"] % 5]
      text = "hm" if word is None else f"<analyze>hm</analyze>\n1. Safety: Is it {word}?"
    return {"choices": [{"message": {"content": text}}]}

  def close(self):
    self._server.shutdown()
    self._thread.join()
    self._server.server_close()
