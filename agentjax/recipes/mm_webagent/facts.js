// What is measured of a page; evaluated in an isolated world, so that a page's own scripts, if it
// could run any, could change nothing here. Returns plain JSON; see facts.py.
(() => {
  const limit = 400;
  const top = (rect) => [rect.x + scrollX, rect.y + scrollY, rect.width, rect.height];
  // What a page leaves for later is wanted now; a page cannot hide from the hits below by not being
  // hit (see ``painted``).
  for (const late of document.querySelectorAll('[loading=lazy]')) late.loading = 'eager';
  for (const still of document.querySelectorAll('[inert]')) still.inert = false;
  const opacities = new Map();
  const opacity = (element) => {  // with that of all ancestors
    if (!element) return 1;
    if (!opacities.has(element)) {
      const style = getComputedStyle(element);
      const filter = style.filter.match(/opacity\(([\d.]+)\)/);
      const own = Number(style.opacity) * (filter ? Number(filter[1]) : 1);
      opacities.set(element, own * opacity(element.parentElement));
    }
    return opacities.get(element);
  };
  const boxed = (element) => getComputedStyle(element).display !== 'contents' ?
    element.checkVisibility() : !element.parentElement || boxed(element.parentElement);
  const seen = (element) => getComputedStyle(element).visibility === 'visible' &&
    boxed(element) && opacity(element) > 0.05;
  // Any colour of CSS as [red, green, blue, alpha], read from a painted pixel.
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const pixels = new Map();
  const pixel = (colour) => {
    if (!pixels.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = 'rgba(0, 0, 0, 0)';
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      pixels.set(colour, [r, g, b, a / 255]);
    }
    return pixels.get(colour);
  };
  const clear = (colour) => pixel(colour)[3] < 0.05;
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3]))
    .concat(1);
  const text = (p) => `rgb(${p.slice(0, 3).map(Math.round).join(', ')})`;
  const stops = (image) =>
    (image.match(/(?:rgba?|hsla?|color|lab|lch|oklab|oklch)\([^()]*\)/g) || [])
      .filter((colour) => !clear(colour));
  const inText = (style) => style.webkitBackgroundClip === 'text';

  // The colours that may stand behind an element, as pixels; null where a picture does.
  const behind = (at) => {
    if (!at) return [[255, 255, 255, 1]];
    const style = getComputedStyle(at);
    if (inText(style)) return behind(at.parentElement);
    if (style.backgroundImage.includes('url(')) return null;
    const gradient = style.backgroundImage.includes('gradient') ? stops(style.backgroundImage) : [];
    const layer = gradient.length ? gradient :
      clear(style.backgroundColor) ? [] : [style.backgroundColor];
    const own = layer.map(pixel);
    if (own.length && own.every((p) => p[3] > 0.99)) return own;
    if (!own.length && ['absolute', 'fixed'].includes(style.position) && at.parentElement) {
      const mine = at.getBoundingClientRect();
      for (const media of document.querySelectorAll('img,video')) {
        const other = media.getBoundingClientRect();
        if (mine.x < other.right && other.x < mine.right && mine.y < other.bottom &&
            other.y < mine.bottom) return null;
      }
    }
    const under = behind(at.parentElement);
    if (!own.length || !under) return under;
    return own.flatMap((p) => under.map((u) => over(p, u))).slice(0, 16);
  };

  // Whether something opaque is painted by an element, so that nothing behind it can be seen.
  const filled = (style) => {
    const gradient = style.backgroundImage.includes('gradient') ? stops(style.backgroundImage) : [];
    return pixel(style.backgroundColor)[3] > 0.95 || style.backgroundImage.includes('url(') ||
      (gradient.length > 0 && gradient.every((colour) => pixel(colour)[3] > 0.95));
  };
  const opaque = (element, box) => {
    const style = getComputedStyle(element);
    if (opacity(element) < 0.95) return false;
    if (style.visibility === 'visible') {
      if (element.tagName === 'VIDEO' || element.naturalWidth > 0) return true;
      if (!inText(style) && filled(style)) return true;
    }
    return ['::before', '::after'].some((part) => {  // one that could cover the whole box
      const own = getComputedStyle(element, part);
      return own.content !== 'none' && own.visibility === 'visible' && Number(own.opacity) > 0.95 &&
        parseFloat(own.width) > box.width - 1 && parseFloat(own.height) > box.height - 1 &&
        filled(own);
    });
  };
  // How many points of an element, given by shares of a box, are neither outside of the page, nor
  // cut off, nor behind something opaque.
  const painted = (element, box, points) => points.filter(([x, y]) => {
    const before = box();
    scrollTo({left: 0, top: before.y + scrollY + before.height / 2 - innerHeight / 2,
      behavior: 'instant'});
    let at = box();
    if (at.x + x * at.width >= innerWidth) {
      scrollBy({left: at.x + at.width / 2 - innerWidth / 2, behavior: 'instant'});
      at = box();
    }
    for (const hit of document.elementsFromPoint(at.x + x * at.width, at.y + y * at.height)) {
      if (element.contains(hit)) return true;
      if (opaque(hit, at)) return false;
    }
    return false;
  }).length;
  const scrolled = (element) => {  // within a part that a reader can scroll
    for (let at = element.parentElement; at && at !== document.body; at = at.parentElement) {
      const style = getComputedStyle(at);
      if (['auto', 'scroll'].some((how) => [style.overflowX, style.overflowY].includes(how)) &&
          at.clientWidth >= 48 && at.clientHeight >= 24) return true;
    }
    return false;
  };
  const thirds = [1 / 6, 1 / 2, 5 / 6];
  const grid = thirds.flatMap((y) => thirds.map((x) => [x, y]));

  const sections = new Map();
  const section = (element) => {
    const part = element.closest('section,article,header,footer,nav,main,[data-section]');
    if (!part) return '';
    if (!sections.has(part)) {
      const heading = part.querySelector('h1,h2,h3');
      sections.set(part, [part.dataset.section, part.id, part.getAttribute('aria-label'),
        part.tagName, heading && heading.textContent].filter(Boolean).join(' ')
        .toLowerCase().slice(0, 160));
    }
    return sections.get(part);
  };

  const texts = [], shown = [], colours = new Map(), reads = new Map();
  const count = (colour, amount) => {
    if (!(amount > 0) || clear(colour)) return;
    const name = text(pixel(colour));
    colours.set(name, (colours.get(name) || 0) + amount);
  };

  const clipped = (element, box) => {
    for (let at = element; at && at !== document.body; at = at.parentElement) {
      const style = getComputedStyle(at);
      if (style.overflowX === 'visible' && style.overflowY === 'visible') continue;
      if (['auto', 'scroll'].includes(style.overflowX)) continue;
      const frame = at.getBoundingClientRect();
      if (box.x < frame.x - 2 || box.right > frame.right + 2 || box.y < frame.y - 2 ||
          box.bottom > frame.bottom + 2) return true;
    }
    return box.right + scrollX < 1 || box.bottom + scrollY < 1;
  };

  const readText = (element, style) => {
    const own = [...element.childNodes].filter((n) => n.nodeType === 3 && n.data.trim());
    if (!own.length || texts.length >= limit) return;
    const inline = style.display === 'inline';
    const range = document.createRange();
    if (inline) range.selectNodeContents(element);
    else { range.setStartBefore(own[0]); range.setEndAfter(own[own.length - 1]); }
    const box = range.getBoundingClientRect();
    if (box.width < 1 || box.height < 1) return;
    const words = (inline ? own.map((n) => n.data).join(' ') : range.toString())
      .replace(/\s+/g, ' ').trim();
    const under = behind(element);
    const inks = inText(style) && stops(style.backgroundImage).length ?
      stops(style.backgroundImage).map(pixel) : [pixel(style.color)];
    reads.set(element, {text: texts.length, range});
    texts.push({
      box: top(box), text: words.slice(0, 200), tag: element.tagName.toLowerCase(),
      size: parseFloat(style.fontSize), weight: parseFloat(style.fontWeight) || 400,
      family: style.fontFamily.split(',')[0].replace(/["']/g, '').trim(),
      colour: text(over(inks[0], (under || [[255, 255, 255, 1]])[0])),
      grounds: (under || []).map(text), clipped: clipped(element, box),
      inline, hidden: false, section: section(element),
    });
    for (const ink of inks) count(text(ink), 12 * words.length / inks.length);
  };

  const here = (address) => {
    if (!URL.canParse(address, document.baseURI)) return String(address).slice(0, 200);
    const url = new URL(address, document.baseURI);
    return url.origin === location.origin ? url.pathname.slice(1) : url.href.slice(0, 200);
  };
  const show = (element, source, natural, loaded, background) => {
    if (shown.length >= limit || !source) return;
    shown.push({
      element, source: here(source), box: top(element.getBoundingClientRect()), natural, loaded,
      fit: getComputedStyle(element).objectFit, background, section: section(element),
    });
  };

  // Hits tell what is painted where, of everything.
  const hits = new CSSStyleSheet();
  const any = ':not(#a#a#a#a)';  // which outweighs most rules of a page
  hits.replaceSync(`${any},${any}::before,${any}::after{pointer-events:auto!important}`);
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, hits];
  for (const element of document.body ? document.body.querySelectorAll('*') : []) {
    if (element.style && getComputedStyle(element).pointerEvents === 'none') {
      element.style.setProperty('pointer-events', 'auto', 'important');
    }
  }
  for (const element of document.body ? document.body.querySelectorAll('*') : []) {
    const style = getComputedStyle(element), rect = element.getBoundingClientRect();
    if (['SCRIPT', 'STYLE', 'TEMPLATE', 'NOSCRIPT'].includes(element.tagName)) continue;
    if (!seen(element)) continue;
    const behind = ['absolute', 'fixed'].includes(style.position);
    if (element.tagName === 'IMG') {
      const loaded = element.complete && element.naturalWidth > 0;
      show(element, element.currentSrc || element.src,
        [element.naturalWidth, element.naturalHeight], loaded, behind);
    } else if (element.tagName === 'VIDEO') {
      const child = element.querySelector('source');
      show(element, element.currentSrc || element.src || (child && child.src),
        [element.videoWidth, element.videoHeight], element.readyState >= 1, behind);
    } else if (element.tagName === 'IFRAME') {
      show(element, element.src, [0, 0], true, behind);
    } else {
      for (const match of style.backgroundImage.matchAll(/url\("?([^")]+)"?\)/g)) {
        if (!match[1].startsWith('data:')) show(element, match[1], [0, 0], true, true);
      }
      readText(element, style);
    }
    count(style.backgroundColor, rect.width * rect.height);
    if (style.backgroundImage.includes('gradient')) {
      const found = stops(style.backgroundImage);
      for (const colour of found) count(colour, rect.width * rect.height / found.length);
    }
    for (const side of ['Top', 'Right', 'Bottom', 'Left']) {
      const length = ['Top', 'Bottom'].includes(side) ? rect.width : rect.height;
      count(style[`border${side}Color`], length * parseFloat(style[`border${side}Width`]));
    }
  }
  const root = document.documentElement;
  count(getComputedStyle(document.body || root).backgroundColor, innerWidth * root.scrollHeight);
  const place = [scrollX, scrollY];
  for (const [element, {text: number, range}] of reads) {
    if (!(element instanceof HTMLElement)) continue;
    const lines = () => [...range.getClientRects()].filter((b) => b.width > 1 && b.height > 1);
    const found = lines().slice(0, 3).some((_, i) => painted(
      element, () => lines()[i] || element.getBoundingClientRect(), [[1 / 2, 1 / 2], [1 / 8, 1 / 2]]
    ));
    if (!found && !scrolled(element)) texts[number].hidden = texts[number].clipped = true;
  }
  const visible = shown.filter(({element, box}) => box[2] > 0 && box[3] > 0 && (
    painted(element, () => element.getBoundingClientRect(), grid) > 1 || scrolled(element)));
  scrollTo({left: place[0], top: place[1], behavior: 'instant'});
  document.adoptedStyleSheets = document.adoptedStyleSheets.filter((sheet) => sheet !== hits);

  // The words that can be seen, as they follow each other.
  const words = [];
  const read = (node) => {
    if (node.nodeType === 3) {
      const found = reads.get(node.parentElement);
      if (found && !texts[found.text].hidden) words.push(node.data);
    } else if (node.nodeType === 1) {
      const joined = ['inline', 'contents'].includes(getComputedStyle(node).display) &&
        node.tagName !== 'BR';
      if (!joined) words.push(' ');
      for (const child of node.childNodes) read(child);
      if (!joined) words.push(' ');
    }
  };
  if (document.body) read(document.body);
  const empty = (frame) => here(frame.src).startsWith('assets/') && frame.contentDocument &&
    (frame.contentDocument.URL === 'about:blank' || frame.contentDocument.readyState !== 'complete');
  return {
    viewport: [innerWidth, innerHeight], content: [root.scrollWidth, root.scrollHeight],
    texts, shown: visible.map(({element, ...one}) => one), colours: [...colours].slice(0, 200),
    words: words.join('').replace(/\s+/g, ' ').slice(0, 400000),
    waiting: [...document.querySelectorAll('img,video')].some((m) =>
      m.tagName === 'IMG' ? !m.complete : m.readyState < 2 && !m.error) ||
      [...document.querySelectorAll('iframe[src]')].some(empty),
  };
})()
