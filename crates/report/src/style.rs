//! The style sheet of every page.

/// Light and dark by the reader's system, light on paper; colours that colour-blind readers can
/// tell apart (Okabe and Ito). A single plot is no wider than one of two.
pub const STYLE: &str = "
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#57606a;--line:#d8dee4;--panel:#f6f8fa;--warn:#8a5300;
--c0:#0072b2;--c1:#d55e00;--c2:#007a5a;--c3:#a3528a;--c4:#8f6a00;--c5:#4b7fa8;--light:38%}
@media screen and (prefers-color-scheme:dark){:root{--bg:#0f1318;--fg:#e6edf3;--soft:#9aa5b1;--line:#30363d;--panel:#171c23;--warn:#f0b35a;
--c0:#56b4e9;--c1:#ff9d57;--c2:#3fc49a;--c3:#e09ac6;--c4:#e6c84f;--c5:#9cc6ea;--light:70%}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:1.6rem;margin:0 0 4px}h2{font-size:1.2rem;margin:40px 0 12px}
p.sub{color:var(--soft);margin:0 0 8px;overflow-wrap:anywhere}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:24px 0;padding:0}
.facts div{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.facts dt{color:var(--soft);font-size:.85rem}.facts dd{margin:0;font-size:1.4rem;font-variant-numeric:tabular-nums}
.warn{border-left:4px solid var(--warn);padding:8px 14px;background:var(--panel);margin:8px 0}
.scroll{overflow-x:auto}

.scroll+.plots{margin-top:16px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92rem}
th,td{padding:6px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}th.text{text-align:left}td.text{text-align:left;white-space:normal}
pre{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 14px;overflow-x:auto;font-size:.92rem}
thead th{color:var(--soft);font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr));gap:24px}.wide{grid-column:1/-1}
figure{margin:0;min-width:0}figcaption{font-weight:600;margin-bottom:4px}
svg{width:100%;height:auto;display:block;overflow:visible}svg text{fill:var(--soft);font-size:12px}svg .label{fill:var(--fg);font-size:13px}
.k0{--k:var(--c0)}.k1{--k:var(--c1)}.k2{--k:var(--c2)}.k3{--k:var(--c3)}.k4{--k:var(--c4)}.k5{--k:var(--c5)}
.grid{stroke:var(--line);stroke-width:1}.line{stroke:var(--k);fill:none;stroke-width:2;stroke-linejoin:round}.fill{fill:var(--k)}
.mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:4 3;fill:none}
.device{stroke:var(--line);stroke-width:1}.batch{stroke:var(--k);stroke-width:1.2;fill:var(--panel)}.batch.lost{stroke-dasharray:3 2;fill:none}
svg .size{font-size:10px;fill:var(--fg)}.cross{stroke:var(--warn);stroke-width:1.5}.bad{fill:var(--warn)}
.plots>.legend{grid-column:1/-1}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;padding:0 0 0 48px;margin:4px 0 0;font-size:.9rem}
.legend svg{display:inline-block;width:28px;height:12px;margin-right:6px;vertical-align:middle}
@media print{main{max-width:none;padding:0}.scroll{overflow:visible}figure,tr,.facts div,.warn,pre{break-inside:avoid}h2{break-after:avoid}
th,td{padding:3px 5px;white-space:normal}table{font-size:.72rem}pre{white-space:pre-wrap}}
";
