"""The style sheet and the script of the report page. Floor 6.

The script only adds: it draws the cross-hair and the read-out under the pointer, at the same step in all charts.
Without it the page is complete. It writes text only, never markup.
"""

CSS = """
:root{color-scheme:light dark;
--page:#fbfaf8;--card:#ffffff;--ink:#1d2126;--soft:#4b525b;--muted:#7a828c;--line:#e4e2dd;--grid:#efede9;
--accent:#2a5d9f;--second:#c8642b;--third:#3f8a6c;--good:#2f7d57;--bad:#b5413b;--mid:#a0772a;
--p0:#2a5d9f;--p1:#9fc0e4;--p2:#c8a13a;--p3:#e3cf93;--p4:#c8642b;--p5:#3f8a6c;--p6:#8d6bb0;--p7:#b9a3d0;--p8:#b8bcc2;
--wash-good:#eaf4ee;--wash-bad:#fbedeb;--wash-mid:#f8f1e2}
@media(prefers-color-scheme:dark){:root{
--page:#14171b;--card:#1b1f24;--ink:#e8eaed;--soft:#b9bfc7;--muted:#8b939d;--line:#2e343b;--grid:#262b31;
--accent:#7db0ee;--second:#ef9a63;--third:#6fc3a0;--good:#6cc598;--bad:#ee8a83;--mid:#d9b25f;
--p0:#6ba3e6;--p1:#3c618f;--p2:#d9b450;--p3:#84713a;--p4:#e98d55;--p5:#62b592;--p6:#ab8bd0;--p7:#6b5788;--p8:#59616b;
--wash-good:#1d2f27;--wash-bad:#372321;--wash-mid:#322b1c}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue","Noto Sans","Liberation Sans",Arial,sans-serif;font-variant-numeric:tabular-nums;
-webkit-font-smoothing:antialiased}
main{max-width:1240px;margin:0 auto;padding:44px 28px 64px}
h1{font-size:34px;line-height:1.15;letter-spacing:-.02em;margin:0;font-weight:650;overflow-wrap:anywhere}
h2{font-size:20px;letter-spacing:-.01em;margin:56px 0 4px;font-weight:620}
h3{font-size:14px;margin:0;font-weight:620}
p.lead{color:var(--soft);margin:0 0 18px;max-width:76ch}
.top{display:flex;gap:16px;align-items:center;flex-wrap:wrap}
.sub{color:var(--soft);margin:8px 0 0}
.state{font-size:13px;font-weight:600;padding:3px 11px;border-radius:99px;background:var(--wash-mid);color:var(--mid)}
.state.done{background:var(--wash-good);color:var(--good)}
.state.failed,.state.killed,.state.refused{background:var(--wash-bad);color:var(--bad)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(168px,1fr));margin:30px 0 0;
border-top:1px solid var(--line);border-bottom:1px solid var(--line)}
.facts div{padding:18px 20px 16px 0}
.facts dt{color:var(--muted);font-size:13px}
.facts dd{margin:0;font-size:27px;font-weight:620;letter-spacing:-.02em;line-height:1.3;white-space:nowrap}
.facts dd small{font-size:15px;font-weight:500;color:var(--muted);letter-spacing:0}
.facts .was{color:var(--muted);font-weight:500}
.facts p{margin:0;font-size:13px;color:var(--soft)}
.facts .up{color:var(--good)}.facts .down{color:var(--bad)}
.charts{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:26px 24px;margin-top:20px}
figure{margin:0;min-width:0}
figure.wide{grid-column:span 2}figure.full{grid-column:1/-1}
figcaption{padding:0 2px 2px}
.note,output{display:block;color:var(--muted);font-size:13px;line-height:20px;height:20px;white-space:nowrap;overflow:hidden;
text-overflow:ellipsis}
output{color:var(--soft)}output:empty{display:none}output:not(:empty)~.note{display:none}
output b{font-weight:620;color:var(--ink)}output i,.key i{display:inline-block;width:9px;height:9px;border-radius:2px;
margin:0 4px 0 9px}
.legend{display:flex;flex-wrap:wrap;gap:0 16px;font-size:13px;color:var(--soft)}
.key i{margin:0 6px 0 0}.key b{font-weight:600;color:var(--ink)}
svg{display:block;width:100%;height:auto;overflow:visible;touch-action:pan-y}
svg text{font-size:11.5px;font-family:inherit;fill:var(--muted)}
svg .label{font-weight:600;font-size:12px}
svg .grid{stroke:var(--grid)}svg .axis{stroke:var(--muted);stroke-opacity:.55}
svg .limit{stroke:var(--muted);stroke-dasharray:4 4;stroke-opacity:.8}
svg .mark{stroke:var(--muted);stroke-dasharray:1 3;stroke-opacity:.9}
svg path.line,svg path.thin,svg path.faint{fill:none;stroke-linejoin:round;stroke-linecap:round}
svg path.line{stroke-width:2}svg path.thin{stroke-width:1.4;stroke-opacity:.75}
svg path.faint{stroke-width:1.1;stroke-opacity:.32}
svg .band{fill-opacity:.14}
svg .dot{stroke:var(--page);stroke-width:1.5}
svg .cross line{stroke:var(--ink);stroke-opacity:.45}svg .cross circle{stroke:var(--page);stroke-width:1.5}
.pairs{display:grid;gap:22px;margin-top:16px}
.pair{border:1px solid var(--line);border-radius:10px;background:var(--card);overflow:hidden}
.asked{padding:12px 18px;border-bottom:1px solid var(--line);display:flex;gap:20px;justify-content:space-between}
.asked .text{font-weight:560}
.answer{color:var(--muted);font-size:13px;text-align:right;max-width:38%;overflow-wrap:anywhere}
.sides{display:grid;grid-template-columns:1fr 1fr}
.side{padding:12px 18px 14px;border-left:3px solid var(--line);min-width:0}
.side.good{border-color:var(--good);background:var(--wash-good)}.side.bad{border-color:var(--bad);background:var(--wash-bad)}
.side.mid{border-color:var(--mid);background:var(--wash-mid)}
.side h4{margin:0 0 4px;font-size:12.5px;font-weight:600;color:var(--soft);display:flex;justify-content:space-between}
.side.good h4 b{color:var(--good)}.side.bad h4 b{color:var(--bad)}.side.mid h4 b{color:var(--mid)}
.text{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;max-height:22em;overflow:auto}
.text .tok{color:var(--muted);font-size:.82em;font-weight:400}.cut,.none{color:var(--muted)}
table{border-collapse:collapse;width:100%;font-size:14px}
th{font-weight:500;color:var(--muted);text-align:left;font-size:13px}
th,td{padding:7px 14px 7px 0;border-bottom:1px solid var(--line);vertical-align:middle}
td.num{white-space:nowrap}td.why{overflow-wrap:anywhere;min-width:12em}
td.span{width:34%}.track{position:relative;height:12px;background:var(--grid);border-radius:3px}
.track i{position:absolute;top:0;bottom:0;min-width:3px;border-radius:3px;background:var(--accent)}
.track i.failed,.track i.killed,.track i.refused{background:var(--bad)}
.track i.stopped,.track i.preempted,.track i.time-limit,.track i.cancelled{background:var(--mid)}
.grids{display:grid;grid-template-columns:repeat(auto-fill,minmax(330px,1fr));gap:6px 40px;margin-top:12px}
.grids dl{margin:0 0 14px}.grids dl h3{padding:6px 0 4px;color:var(--soft)}
.row{display:flex;justify-content:space-between;gap:16px;border-bottom:1px solid var(--line);padding:4px 0;
font-size:13.5px}
.row dt{color:var(--soft)}.row dd{margin:0;text-align:right;overflow-wrap:anywhere;font-weight:600}
.row.default dt,.row.default dd{color:var(--muted);font-weight:400}
details{margin-top:14px}details.frame .text{font-size:13.5px;color:var(--soft);padding:6px 0 2px}
details summary{cursor:pointer;color:var(--accent);font-weight:560;padding:4px 0}
footer{margin-top:56px;padding-top:14px;border-top:1px solid var(--line);color:var(--muted);font-size:13px;
overflow-wrap:anywhere}
@media(max-width:980px){.charts{grid-template-columns:repeat(2,minmax(0,1fr))}}
@media(max-width:640px){main{padding:26px 16px 40px}.charts,.sides{grid-template-columns:minmax(0,1fr)}
figure.wide,figure.full{grid-column:auto}.plot{overflow-x:auto}.wide svg,.full svg{min-width:620px}
td.span,th.span{display:none}.asked{display:block}.answer{text-align:left;max-width:none}h1{font-size:27px}}
@media print{main{max-width:none}.pair,figure{break-inside:avoid}}
"""

SCRIPT = """
(()=>{
const data=JSON.parse(document.getElementById('data').textContent), NS='http://www.w3.org/2000/svg', all=[];
const make=(name,attributes,color)=>{const e=document.createElementNS(NS,name);
 for(const key in attributes)e.setAttribute(key,attributes[key]);if(color)e.style.fill='var(--'+color+')';return e};
const nearest=(list,at)=>{let best=0;
 list.forEach((one,i)=>{if(Math.abs(one-at)<Math.abs(list[best]-at))best=i});return best};
const show=(chart,step)=>{const {d,cross,out}=chart;cross.replaceChildren();
 if(step===null){out.replaceChildren();return}
 const i=nearest(d.m,step), x=d.x[i], nodes=['step '+d.s[i]];
 cross.append(make('line',{x1:x,x2:x,y1:cross.dataset.top,y2:cross.dataset.bottom}));
 for(const line of d.l){if(line.p&&(line.y[i]===null||line.y[i]===undefined)&&line.y.length)continue;
  if(line.y[i]!==null&&line.y[i]!==undefined)cross.append(make('circle',{cx:x,cy:line.y[i],r:3.8},line.c));
  const dot=document.createElement('i'), bold=document.createElement('b');
  dot.style.background='var(--'+line.c+')';bold.textContent=' '+line.v[i]+(d.u?' '+d.u:'');nodes.push(dot,line.n,bold)}
 out.replaceChildren(...nodes)};
for(const figure of document.querySelectorAll('figure[data-chart]')){
 const d=data[figure.dataset.chart], svg=figure.querySelector('svg');if(!d||!d.x)continue;
 const chart={d,cross:svg.querySelector('.cross'),out:figure.querySelector('output')};all.push(chart);
 svg.addEventListener('pointermove',event=>{const box=svg.getBoundingClientRect(),
  x=(event.clientX-box.left)/box.width*svg.viewBox.baseVal.width, step=d.m[nearest(d.x,x)];
  for(const other of all)show(other,step)});
 svg.addEventListener('pointerleave',()=>{for(const other of all)show(other,null)});
}})();
"""
