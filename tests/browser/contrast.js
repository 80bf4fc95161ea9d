// Returns the texts whose colour is too close to what is behind them (WCAG: 4.5, large text 3).
const parse = (text) => {
  const numbers = text.match(/[\d.]+(?:e-?\d+)?/g).map(Number);
  const scale = text.startsWith("color(") ? 255 : 1;
  const shift = text.startsWith("color(srgb") ? 0 : 0;
  const [r, g, b] = numbers.slice(shift, shift + 3).map((v) => v * scale);
  return [r, g, b, numbers.length > 3 ? numbers[3] : 1];
};
const over = (top, below) => {
  const a = top[3];
  return [0, 1, 2].map((i) => top[i] * a + below[i] * (1 - a)).concat(1);
};
const behind = (element) => {
  const layers = [];
  for (let e = element; e; e = e.parentElement) {
    const colour = parse(getComputedStyle(e).backgroundColor);
    if (colour[3] > 0) layers.push(colour);
    if (colour[3] === 1) break;
  }
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
};
const light = (colour) => {
  const [r, g, b] = colour.slice(0, 3).map((v) => {
    const s = v / 255;
    return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const poor = [];
let checked = 0;
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const element = node.parentElement;
  if (!node.textContent.trim() || ["SCRIPT", "STYLE", "TITLE", "OPTION", "NOSCRIPT"].includes(element.tagName.toUpperCase())) continue;
  if (!element.checkVisibility()) continue;
  const style = getComputedStyle(element);
  const background = behind(element.closest("svg") || element);
  const colour = over(parse(element.closest("svg") ? style.fill : style.color), background);
  const [a, b] = [light(colour), light(background)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  checked += 1;
  if (ratio < (large ? 3 : 4.5)) {
    poor.push(`${ratio.toFixed(2)} ${element.tagName}.${element.className.baseVal ?? element.className}: ${node.textContent.trim().slice(0, 40)}`);
  }
}
return { checked, poor: [...new Set(poor)] };
