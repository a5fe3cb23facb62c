"""What tools may reach: patterns and ranges, and a session that keeps to them."""

import asyncio
import contextlib
import socket

import pytest

from agentjax.config import ConfigError
from agentjax.tools.egress import EgressConfig, EgressDenied, EgressPolicy, normal_host, urls


def policy(*allow, **settings):
  config = EgressConfig(allow=allow, **settings)
  config.validate()
  return EgressPolicy(config)


@pytest.mark.parametrize(
  ("allow", "deny", "host", "port", "allowed"),
  [
    ([], [], "example.org", 443, False),
    (["example.org"], [], "example.org", 443, True),
    (["example.org"], [], "EXAMPLE.org.", 80, True),
    (["example.org"], [], "example.org", 8080, False),
    (["example.org:8080"], [], "example.org", 8080, True),
    (["example.org:8080"], [], "example.org", 443, False),
    (["example.org:*"], [], "example.org", 22, True),
    (["example.org"], [], "a.example.org", 443, False),
    (["*.example.org"], [], "a.b.example.org", 443, True),
    (["*.example.org"], [], "example.org", 443, False),
    (["*.example.org"], [], "badexample.org", 443, False),
    (["*"], [], "anything.net", 443, True),
    (["*"], ["*.anything.net"], "x.anything.net", 443, False),
    (["*:*"], ["*:25"], "anything.net", 25, False),
    (["*"], ["anything.net"], "anything.net", 80, False),
    (["bücher.example"], [], "xn--bcher-kva.example", 443, True),
    (["93.184.216.34"], [], "93.184.216.34", 443, True),
    (["[2606:4700::1111]:443"], [], "2606:4700:0:0::1111", 443, True),
    (["*"], [], "no host", 443, False),
    (["*"], [], "a..b", 443, False),
    (["*"], [], "2130706433", 80, False),
    (["*"], [], "127.1", 80, False),
    (["*"], [], "0x7f.0.0.0x1", 80, False),
  ],
)
def test_hosts_are_denied_unless_allowed(allow, deny, host, port, allowed):
  checked = policy(*allow, deny=tuple(deny))
  with contextlib.nullcontext() if allowed else pytest.raises(EgressDenied):
    checked.check_host(host, port)


NOT_PUBLIC = [
  "127.0.0.1",
  "127.8.8.8",
  "0.0.0.0",
  "10.0.0.1",
  "172.16.3.4",
  "192.168.1.1",
  "100.64.0.1",
  "169.254.169.254",
  "224.0.0.1",
  "240.0.0.1",
  "255.255.255.255",
  "192.0.2.1",
  "198.18.0.1",
  "::",
  "::1",
  "fe80::1%eth0",
  "fc00::1",
  "fd00:ec2::254",
  "ff02::1",
  "::ffff:127.0.0.1",
  "::ffff:10.0.0.1",
  "::127.0.0.1",
  "64:ff9b::7f00:1",
  "64:ff9b::a9fe:a9fe",
  "2002:7f00:1::",
  "2001:db8::1",
  "not an address",
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_no_name_leads_to_an_address_that_is_not_public(address):
  with pytest.raises(EgressDenied):
    policy("*").check_address("innocent.example", 443, address)


@pytest.mark.parametrize(
  "address", ["93.184.216.34", "2606:4700::1111", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"]
)
def test_public_addresses_may_be_connected_to(address):
  policy("example.org").check_address("example.org", 443, address)


def test_ranges_may_be_allowed_and_addresses_denied():
  house = policy("*", allow_addresses=("10.1.0.0/16", "::1/128"))
  house.check_address("db.example", 443, "10.1.2.3")
  house.check_address("db.example", 443, "::ffff:10.1.2.3")
  house.check_host("::1", 443)
  with pytest.raises(EgressDenied, match="db.example leads to 10.2.0.1:443, which is no public"):
    house.check_address("db.example", 443, "10.2.0.1")
  with pytest.raises(EgressDenied, match="list of denied hosts"):
    policy("*", deny=("93.184.216.34",)).check_address("x.example", 443, "93.184.216.34")


@pytest.mark.parametrize(
  ("url", "said"),
  [
    ("https://example.org/a?b#c", None),
    ("HTTP://Example.ORG", None),
    ("https://example.org:8443/", "example.org:8443 is not among the allowed"),
    ("file:///etc/passwd", "scheme 'file'"),
    ("gopher://example.org", "scheme 'gopher'"),
    ("https://example.org@evil.net/", "user name"),
    ("https://user:pw@example.org/", "user name"),
    ("https://evil.net\\@example.org/", "names no host"),
    ("https:///path", "names no host"),
    ("https://example.org:99999/", "no address of the web"),
    ("https://[::1/", "no address of the web"),
  ],
)
def test_addresses_of_the_web_are_checked_as_a_whole(url, said):
  with pytest.raises(EgressDenied, match=said) if said else contextlib.nullcontext():
    policy("example.org").check_url(url)


def test_addresses_are_found_in_text():
  text = "see https://a.example/x?y=(1), <ftp://b.example>; or 'http://[::1]:80/' not a//b"
  assert list(urls(text)) == ["https://a.example/x?y=(1", "ftp://b.example", "http://[::1]:80/"]


@pytest.mark.parametrize(
  ("settings", "field"),
  [
    ({"allow": ("https://x.org",)}, "allow"),
    ({"allow": ("x.org:http",)}, "allow"),
    ({"allow": ("x.org:0",)}, "allow"),
    ({"deny": ("",)}, "deny"),
    ({"deny": ("*.*",)}, "deny"),
    ({"allow_addresses": ("10.0.0.1/8",)}, "allow_addresses"),
  ],
)
def test_patterns_that_mean_nothing_are_refused(settings, field):
  with pytest.raises(ConfigError, match=f"config.egress.{field}"):
    EgressConfig(**settings).validate("config.egress")


@pytest.mark.parametrize("host", ["", "-", "a b", "a/b", "1.2.3.4.5", "x" * 9 + "\0"])
def test_what_is_no_host_is_told_so(host):
  with pytest.raises(ValueError):
    normal_host(host)


# Over the wire, between a session and servers on this machine.


class Names:
  """A resolver with fixed answers, one after the other; remembers what was asked."""

  def __init__(self, **answers):
    self.answers = {name.replace("_", "."): list(found) for name, found in answers.items()}
    self.asked = []

  async def resolve(self, host, port=0, family=socket.AF_INET):
    self.asked.append(host)
    found = self.answers[host]
    addresses = found.pop(0) if len(found) > 1 else found[0]
    return [
      {"hostname": host, "host": a, "port": port, "family": family, "proto": 0, "flags": 0}
      for a in ([addresses] if isinstance(addresses, str) else addresses)
    ]

  async def close(self):
    pass


@pytest.fixture
def visit():
  """Gets paths of a server on 127.0.0.1 through a guarded session; gives what came of each."""
  pytest.importorskip("aiohttp", reason="needs the extra [web]")
  from aiohttp import web

  from agentjax.adapters.tools.egress_http import guarded_session

  def visit(*visited, names=None, allow=("*:*",), allow_addresses=("127.0.0.1/32",), **options):
    reached = []

    async def hello(request):
      reached.append(request.path)
      return web.Response(text=f"hello {request.host.split(':')[0]}")

    async def away(request):
      raise web.HTTPFound(request.query["to"].replace("PORT", str(request.url.port)))

    async def run():
      app = web.Application()
      app.add_routes([web.get("/hello", hello), web.get("/away", away)])
      runner = web.AppRunner(app)
      await runner.setup()
      site = web.TCPSite(runner, "127.0.0.1", 0)
      await site.start()
      port = site._server.sockets[0].getsockname()[1]
      checked = policy(
        *(pattern.replace("PORT", str(port)) for pattern in allow),
        allow_addresses=allow_addresses,
      )
      outcomes = []
      try:
        async with guarded_session(checked, resolver=names) as session:
          for url in visited:
            try:
              async with session.get(url.replace("PORT", str(port)), **options) as response:
                outcomes.append(await response.text())
            except EgressDenied as denied:
              outcomes.append(denied)
      finally:
        await runner.cleanup()
      return outcomes, reached

    return asyncio.run(run())

  return visit


def denied(outcome, said):
  return isinstance(outcome, EgressDenied) and said in str(outcome)


def test_an_allowed_host_is_reached_at_the_address_that_was_checked(visit):
  names = Names(good_test=["127.0.0.1"])
  outcomes, reached = visit("http://good.test:PORT/hello", names=names, allow=("good.test:PORT",))
  assert (outcomes, reached, names.asked) == (["hello good.test"], ["/hello"], ["good.test"])


def test_other_hosts_and_ports_are_not_even_looked_up(visit):
  names = Names(bad_test=["127.0.0.1"])
  outcomes, reached = visit(
    "http://bad.test:PORT/hello",
    "http://good.test:1/hello",
    "http://127.0.0.1:PORT/hello",
    names=names,
    allow=("good.test:PORT",),
  )
  assert all(denied(o, "not among the allowed hosts") for o in outcomes)
  assert (reached, names.asked) == ([], [])


def test_a_name_or_address_that_leads_into_the_house_is_refused(visit):
  names = Names(good_test=["127.0.0.1"], mixed_test=[["93.184.216.34", "127.0.0.1"]])
  outcomes, reached = visit(
    "http://good.test:PORT/hello",
    "http://mixed.test:PORT/hello",
    "http://127.0.0.1:PORT/hello",
    "http://[::ffff:127.0.0.1]:PORT/hello",
    names=names,
    allow_addresses=(),
  )
  assert all(denied(o, "which is no public address") for o in outcomes)
  assert reached == []


@pytest.mark.parametrize(
  ("to", "said"),
  [
    ("http://evil.test:PORT/hello", "evil.test"),
    ("http://127.0.0.2:PORT/hello", "127.0.0.2"),
    ("http://inside.test:PORT/hello", "inside.test leads to 10.0.0.7"),
    ("http://good.test:1/hello", "good.test:1 "),
  ],
)
def test_every_redirect_is_checked_again(visit, to, said):
  names = Names(good_test=["127.0.0.1"], inside_test=["10.0.0.7"])
  allow = ("good.test:PORT", "inside.test:PORT", "127.0.0.2:PORT")
  outcomes, reached = visit(f"http://good.test:PORT/away?to={to}", names=names, allow=allow)
  assert denied(outcomes[0], said)
  assert reached == []


def test_a_redirect_within_what_is_allowed_is_followed(visit):
  names = Names(good_test=["127.0.0.1"])
  url = "http://good.test:PORT/away?to=http://good.test:PORT/hello"
  assert visit(url, names=names) == (["hello good.test"], ["/hello"])


def test_a_name_that_changes_its_mind_gains_nothing(visit):
  # Were it asked a second time, to connect, it would lead elsewhere.
  names = Names(rebind_test=["127.0.0.1", "127.0.0.2"])
  outcomes, reached = visit("http://rebind.test:PORT/hello", names=names)
  assert (outcomes, reached) == (["hello rebind.test"], ["/hello"])
  assert names.asked == ["rebind.test"]
  names = Names(rebind_test=["127.0.0.2", "127.0.0.1"])
  outcomes, _ = visit("http://rebind.test:PORT/hello", names=names)
  assert denied(outcomes[0], "rebind.test leads to 127.0.0.2")


def test_a_proxy_is_refused(visit):
  outcomes, reached = visit("http://good.test:PORT/hello", proxy="http://127.0.0.1:1")
  assert denied(outcomes[0], "proxy")
  assert reached == []
