"""The report page around its content: a string.Template with $title, $about, $legend and $body.

A Python file and not an HTML file, so that every kind of install has it. The colours: --c0 to --c5 for runs and
metrics, --c6 to --c10 for the phases of a step.
"""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$title · Jet-RL</title>
<style>
:root { color-scheme: light dark; --page:#f6f7f9; --card:#fff; --ink:#15191f; --soft:#5d6673; --rule:#e3e6eb;
  --zero:#e4f5ec; --good:#0b7a4b; --bad:#b3372b; --shade:235,104,52;
  --c0:#2a6fd6; --c1:#e0622b; --c2:#15956a; --c3:#7a52c7; --c4:#c58a00; --c5:#c9427f;
  --c6:#46587f; --c7:#c2a23a; --c8:#8ea3cf; --c9:#7f9c8a; --c10:#c7ccd6; }
@media (prefers-color-scheme: dark) { :root { --page:#0e1116; --card:#171b22; --ink:#e8ebf0; --soft:#98a2b0;
  --rule:#2a303a; --zero:#12322a; --good:#4cc38a; --bad:#f2857a; --shade:224,110,60;
  --c0:#5b9bf5; --c1:#f08a55; --c2:#35b887; --c3:#a98bef; --c4:#d9a92e; --c5:#e678a8;
  --c6:#7186b5; --c7:#cdb458; --c8:#46587f; --c9:#7f9c8a; --c10:#4a515d; } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif }
main { max-width:1180px; margin:0 auto; padding:32px 24px 64px }
header { margin-bottom:20px }
header .brand { font-weight:700; letter-spacing:.02em; color:var(--c0); font-size:13px }
h1 { font-size:28px; line-height:1.2; margin:2px 0 4px; letter-spacing:-.015em; overflow-wrap:anywhere }
h2 { font-size:18px; margin:36px 0 12px; letter-spacing:-.01em }
h3 { font-size:14px; margin:0 0 8px }
small { font-weight:400; color:var(--soft); font-size:.62em } td small { font-size:12px }
.note { color:var(--soft); font-size:13px; font-weight:400 } p.note { margin:0 0 8px }
.tiles { display:flex; flex-wrap:wrap; gap:14px } .tile { flex:1 1 auto; min-width:150px }
.tile, figure, .sample, .wide, details { background:var(--card); border:1px solid var(--rule); border-radius:10px }
.tile { padding:14px 16px; display:flex; flex-direction:column }
.tile span { color:var(--soft); font-size:13px }
.tile b { font-size:26px; letter-spacing:-.02em; line-height:1.35; white-space:nowrap }
.tile em { font-style:normal; font-size:13px; color:var(--soft) } .tile.good em, .good { color:var(--good) }
.bad { color:var(--bad) }
nav { position:sticky; top:0; z-index:2; display:flex; flex-wrap:wrap; gap:8px; align-items:center; padding:10px 0;
  background:var(--page) }
nav button { font:inherit; font-size:13px; color:inherit; background:var(--card); border:1px solid var(--rule);
  border-radius:99px; padding:4px 12px; cursor:pointer }
nav button[aria-pressed=false] { opacity:.4 }
.dot { display:inline-block; width:9px; height:9px; border-radius:50%; background:var(--c); margin-right:6px }
.grid { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(420px,100%),1fr)); gap:14px }
figure { margin:0; padding:14px 16px 10px; min-width:0; display:flex; flex-direction:column }
figure .plot { margin-top:auto } figure .bars { margin-bottom:auto } .grid+.note { margin-top:10px }
figcaption { font-weight:600; display:flex; flex-wrap:wrap; justify-content:space-between; gap:2px 12px }
figcaption>span { font-weight:400; font-size:13px; color:var(--soft); display:flex; flex-wrap:wrap; gap:0 12px }
figcaption>span>span { white-space:nowrap }
.plot { position:relative } svg { display:block; width:100%; height:auto }
.tick { font-size:11.5px; fill:var(--soft); font-variant-numeric:tabular-nums } .name { fill:var(--ink) }
.plot line.grid { stroke:var(--rule); stroke-width:1 } .cross { stroke:var(--soft); stroke-dasharray:3 3 }
.zero { fill:var(--zero) } .proof { font-size:15px; font-weight:600; fill:var(--good) }
.line path { fill:none; stroke:var(--c); stroke-width:2; stroke-linejoin:round; stroke-linecap:round }
.line circle { fill:var(--c) }
.faint path { stroke-width:1.2; opacity:.38 } .faint circle { opacity:.38; r:2px }
.line path.cut { stroke:var(--bad); stroke-width:1.6 } .bar rect { fill:var(--c) }
.tip { position:absolute; pointer-events:none; background:var(--card); border:1px solid var(--rule); border-radius:8px;
  padding:6px 10px; font-size:12.5px; box-shadow:0 4px 16px #0003; white-space:nowrap; z-index:3 }
.tip b { float:right; margin-left:14px; font-variant-numeric:tabular-nums }
.wide { overflow-x:auto } table { border-collapse:collapse; width:100%; font-size:13.5px }
th, td { text-align:left; padding:7px 14px; border-top:1px solid var(--rule); vertical-align:top }
tr:first-child th { border-top:0 }
th { color:var(--soft); font-weight:500; white-space:nowrap }
.wide+.note { margin-top:8px } .wide+details { margin-top:10px }
.runs td+td, .runs th+th { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap }
.mean td { font-weight:600 } .seed td { color:var(--soft); border-top:0; padding-top:2px; padding-bottom:2px }
.seed td:first-child { padding-left:30px }
details { padding:10px 16px; margin-bottom:10px } summary { cursor:pointer; font-weight:500 }
details details { border:0; padding:0; margin:0 0 8px; font-size:13px }
.sample { border:0; border-top:1px solid var(--rule); border-radius:0; margin-top:12px; padding-top:14px }
.card { border:1px solid var(--rule); border-radius:8px; padding:10px 14px; min-width:0 }
.card p { margin:0 0 6px; font-size:13px; color:var(--soft) }
pre { margin:0; white-space:pre-wrap; overflow-wrap:anywhere;
  font:13px/1.65 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace }
.prompt { border-left:3px solid var(--rule); padding-left:12px; color:var(--soft); margin-bottom:10px }
pre span[title] { border-radius:3px; background:rgba(var(--shade),var(--a,0)) }
.scale i { display:inline-block; width:90px; height:10px; margin:0 6px; border-radius:3px;
  background:linear-gradient(90deg,transparent,rgba(var(--shade),.74)); border:1px solid var(--rule) }
[hidden] { display:none }
@media print { body { background:#fff } nav { position:static } figure, .tile { break-inside:avoid } }
</style>
</head>
<body>
<main>
<header><div class="brand">Jet-RL</div><h1>$title</h1><div class="note">$about</div></header>
$legend
$body
</main>
<script>
for (const plot of document.querySelectorAll(".plot")) {
  const script = plot.querySelector("script"); if (!script) continue;
  const data = JSON.parse(script.textContent), svg = plot.querySelector("svg"), cross = svg.querySelector(".cross");
  const tip = plot.appendChild(document.createElement("div")); tip.className = "tip"; tip.hidden = true;
  const steps = [...new Set(data.series.flatMap(s => s.p.map(p => p[0])))].sort((a, b) => a - b);
  const [left, right, width] = data.box, span = data.high - data.low;
  const px = x => span ? left + (x - data.low) / span * (right - left) : (left + right) / 2;
  const plain = v => v === 0 || Math.abs(v) >= 1e-3 && Math.abs(v) < 1e6;
  const digits = v => plain(v) ? v.toLocaleString("en", {maximumSignificantDigits: 4}) : v.toExponential(2);
  plot.addEventListener("pointerleave", () => { tip.hidden = true; cross.setAttribute("hidden", ""); });
  plot.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    if (!steps.length) return;
    const step = steps.reduce((best, x) => Math.abs(px(x) - at) < Math.abs(px(best) - at) ? x : best);
    cross.setAttribute("x1", px(step)); cross.setAttribute("x2", px(step)); cross.removeAttribute("hidden");
    tip.replaceChildren("step " + step);
    for (const s of data.series) {
      const point = s.p.find(p => p[0] === step);
      if (!point || document.body.classList.contains("off" + s.g)) continue;
      const row = tip.appendChild(document.createElement("div")), dot = row.appendChild(document.createElement("i"));
      dot.className = "dot"; dot.style.setProperty("--c", "var(--c" + s.c + ")");
      const value = row.appendChild(document.createElement("b"));
      value.before(s.l); value.textContent = point[1] === null ? "not finite" : digits(point[1]);
    }
    tip.hidden = false;
    const x = px(step) / width * box.width;
    tip.style.top = "8px"; tip.style.left = (x < box.width / 2 ? x + 12 : x - tip.offsetWidth - 12) + "px";
  });
}
for (const button of document.querySelectorAll("nav button")) button.addEventListener("click", () => {
  const g = button.dataset.g, off = document.body.classList.toggle("off" + g);
  button.setAttribute("aria-pressed", String(!off));
  for (const el of document.querySelectorAll(".g" + g)) el.style.display = off ? "none" : "";
});
</script>
</body>
</html>
"""
