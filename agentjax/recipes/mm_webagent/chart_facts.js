// What is measured in the frame of a chart; see ChartFacts in facts.py.
(() => {
  const marked = document.querySelectorAll('svg .mark');
  const paths = [...document.querySelectorAll('svg path')].filter((path) => {
    const box = path.getBBox();
    const style = getComputedStyle(path);
    return (style.fill !== 'none' || parseFloat(style.strokeWidth) > 1.5) &&
      box.width + box.height > 2 && path.getAttribute('fill') !== 'transparent';
  });
  const texts = [...document.querySelectorAll('svg text')].filter((t) => t.textContent.trim());
  const outside = texts.filter((text) => {
    const box = text.getBoundingClientRect();
    return box.x < -2 || box.y < -2 || box.right > innerWidth + 2 || box.bottom > innerHeight + 2;
  });
  const words = (list) => list.slice(0, 100).map((t) => t.textContent.trim().slice(0, 80));
  return {
    marks: marked.length || paths.length, texts: words(texts), outside: words(outside),
    error: document.body.dataset.error || '',
  };
})()
