//! Flat-top behaviour (Symphony §3.5, figure 2): offered load from 0 to 150% of capacity, with the
//! autoscale advisor's advice.
//!
//! ```text
//! cargo run --release -p downbeat-lab --example flat_top -- lab/docs/flat_top.svg
//! ```
//!
//! Figure 2's workload: 10 ResNet50 models of equal popularity, SLO 100 ms, 24 devices, Poisson
//! arrivals. Prints a table and draws goodput, busy share and advice for deferred and for eager
//! dispatch.

use std::fmt::Write;

use downbeat_core::cluster::{
    Advice, Autoscale, AutoscaleOptions, AutoscaleSample, DispatchPolicy, DropPolicy, ModelOptions,
};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_sim::{Arrivals, Load, Pace, Simulation, fluid};

const SEED: u64 = 2;
const MODELS: u32 = 10;
const DEVICES: u32 = 24;
const SPAN: Duration = Duration::from_millis(10_000);
/// The step of the offered load, in percent of the capacity.
const STEP: u32 = 10;
const MOST: u32 = 150;

struct Point {
    offered: f64,
    goodput: f64,
    busy: f64,
    bad: f64,
    /// The advice by the paper's rule, and by the default options.
    advice: [Advice; 2],
}

struct Curve {
    name: &'static str,
    points: Vec<Point>,
}

fn simulation(
    rate: f64,
    dispatch: &DispatchPolicy,
    drop: DropPolicy,
) -> Result<Simulation, Box<dyn std::error::Error>> {
    let (alpha, beta) = (Duration::from_millis_f64(1.053), Duration::from_millis_f64(5.072));
    let options = ModelOptions::new(LatencyProfile::linear(alpha, beta, 128)?, dispatch.clone(), drop);
    let load = Load {
        options,
        slo: Duration::from_millis(100),
        arrivals: Arrivals::Poisson,
        rate: rate / f64::from(MODELS),
        pace: Pace::default(),
    };
    let loads = vec![load; MODELS as usize];
    Ok(Simulation { loads, devices: DEVICES, span: SPAN, seed: SEED, ..Simulation::default() })
}

/// Returns the advisor's advice for a run, from the counters at its begin and at its end.
fn advise(options: AutoscaleOptions, good: u64, bad: u64, busy: f64) -> Result<Advice, Box<dyn std::error::Error>> {
    let mut advisor = Autoscale::new(AutoscaleOptions { grow_window: SPAN, shrink_window: SPAN, ..options })?;
    let first = AutoscaleSample { devices: DEVICES, ..AutoscaleSample::default() };
    advisor.handle_sample(Time::ZERO, first)?;
    let busy = Duration::from_secs_f64(busy * SPAN.as_secs_f64() * f64::from(DEVICES));
    Ok(advisor.handle_sample(Time::ZERO + SPAN, AutoscaleSample { good, bad, busy, ..first })?)
}

fn curve(
    name: &'static str,
    capacity: f64,
    dispatch: &DispatchPolicy,
    drop: DropPolicy,
) -> Result<Curve, Box<dyn std::error::Error>> {
    let mut points = Vec::new();
    for percent in (STEP..=MOST).step_by(STEP as usize) {
        let rate = capacity * f64::from(percent) / 100.0;
        let report = simulation(rate, dispatch, drop)?.run()?;
        let (good, bad, busy) = (report.good(), report.offered() - report.good(), report.mean_busy());
        let paper = AutoscaleOptions { idle_threshold: 0.0, spare: 0.0, ..AutoscaleOptions::default() };
        let advice = [advise(paper, good, bad, busy)?, advise(AutoscaleOptions::default(), good, bad, busy)?];
        points.push(Point { offered: rate, goodput: report.goodput(), busy, bad: report.bad_share(), advice });
    }
    Ok(Curve { name, points })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let choices = [
        ("deferred, window drop", DispatchPolicy::Deferred, DropPolicy::WindowDrop),
        ("eager, head drop", DispatchPolicy::Eager, DropPolicy::HeadDrop),
    ];
    let bound = fluid(&simulation(1.0, &choices[0].1, choices[0].2)?.loads, DEVICES).ok_or("an SLO below l(1)")?;
    // One scale for both: the capacity under deferred dispatch.
    let unit = simulation(f64::from(MODELS), &choices[0].1, choices[0].2)?;
    let high = bound / f64::from(MODELS);
    let capacity = downbeat_sim::capacity(&unit, 0.3 * high, 1.2 * high, 0.01)?.map_err(|_| "no load is held")?.rate;
    println!(
        "seed {SEED}; capacity {capacity:.0} r/s with {}, {:.1}% of the fluid bound\n",
        choices[0].0,
        100.0 * capacity / bound
    );
    let mut curves = Vec::new();
    for (name, dispatch, drop) in &choices {
        curves.push(curve(name, capacity, dispatch, *drop)?);
    }
    println!(
        "| offered | {} |",
        curves
            .iter()
            .map(|c| format!("{}: goodput r/s | busy | bad | advice, paper's rule | advice, default", c.name))
            .collect::<Vec<_>>()
            .join(" | ")
    );
    println!("|---|{}", "---|".repeat(5 * curves.len()));
    for row in 0..curves[0].points.len() {
        let cells: Vec<String> = curves
            .iter()
            .map(|curve| {
                let p = &curve.points[row];
                let [paper, default] = p.advice.map(|a| format!("{:+}", a.change));
                format!("{:.0} | {:.0}% | {:.1}% | {paper} | {default}", p.goodput, 100.0 * p.busy, 100.0 * p.bad)
            })
            .collect();
        println!("| {}% | {} |", (row as u32 + 1) * STEP, cells.join(" | "));
    }
    if let Some(file) = std::env::args().nth(1) {
        std::fs::write(&file, picture(capacity, &curves))?;
        eprintln!("{file} written");
    }
    Ok(())
}

/// Draws three panels side by side: goodput, busy share, advice.
fn picture(capacity: f64, curves: &[Curve]) -> String {
    let most = 1.5 * capacity;
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1080 330\" font-family=\"system-ui,sans-serif\" font-size=\"12\" \
         role=\"img\"><title>Goodput, busy share and autoscale advice by offered load</title><rect width=\"1080\" height=\"330\" \
         fill=\"#fff\"/>\n",
    );
    type Measured = fn(&Point) -> f64;
    type Ideal = fn(f64, f64) -> f64;
    // Title, lowest and highest value, the measured quantity, and the flat top by the offered share
    // of the capacity.
    let panels: [(&str, f64, f64, Measured, Ideal); 3] = [
        ("goodput, r/s", 0.0, most, |p| p.goodput, |share, capacity| share.min(1.0) * capacity),
        ("busy share", 0.0, 1.0, |p| p.busy, |share, _| share.min(1.0)),
        (
            "devices to add, paper's rule",
            -24.0,
            24.0,
            |p| p.advice[0].change as f64,
            |share, _| f64::from(DEVICES) * (share - 1.0),
        ),
    ];
    for (index, (title, low, high, of, ideal)) in panels.into_iter().enumerate() {
        let left = 60.0 + 350.0 * index as f64;
        let x = |offered: f64| left + 270.0 * offered / most;
        // A value beyond the panel is drawn at the panel's edge.
        let y = |value: f64| 260.0 - 210.0 * (value.clamp(low, high) - low) / (high - low);
        // Writing to a string cannot fail.
        let _ = writeln!(svg, "<text x=\"{left}\" y=\"30\" font-weight=\"600\">{title}</text>");
        for step in 0..=4 {
            let value = low + (high - low) * f64::from(step) / 4.0;
            let at = y(value);
            let text = if index == 1 { format!("{:.0}%", 100.0 * value) } else { format!("{value:.0}") };
            let _ = writeln!(svg, "<path d=\"M{left} {at}h270\" stroke=\"#d8dee4\"/>");
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"end\" fill=\"#57606a\">{text}</text>",
                left - 6.0,
                at + 4.0
            );
        }
        for percent in [0, 50, 100, 150] {
            let at = x(capacity * f64::from(percent) / 100.0);
            let _ =
                writeln!(svg, "<text x=\"{at}\" y=\"278\" text-anchor=\"middle\" fill=\"#57606a\">{percent}%</text>");
        }
        let path = |points: &mut dyn Iterator<Item = (f64, f64)>| -> String {
            let mut path = String::new();
            for (offered, value) in points {
                let _ = write!(path, "{}{:.1} {:.1}", if path.is_empty() { 'M' } else { 'L' }, x(offered), y(value));
            }
            path
        };
        let even = path(&mut curves[0].points.iter().map(|p| (p.offered, ideal(p.offered / capacity, capacity))));
        let _ = writeln!(svg, "<path d=\"{even}\" fill=\"none\" stroke=\"#8f98a3\" stroke-dasharray=\"2 4\"/>");
        for (curve, (colour, dash)) in curves.iter().zip([("#0072b2", "none"), ("#d55e00", "7 3")]) {
            let line = path(&mut curve.points.iter().map(|p| (p.offered, of(p))));
            let _ = writeln!(
                svg,
                "<path d=\"{line}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"/>"
            );
        }
    }
    let legend = [
        (curves[0].name, "#0072b2", "none"),
        (curves[1].name, "#d55e00", "7 3"),
        ("ideal (flat top)", "#8f98a3", "2 4"),
    ];
    for (index, (name, colour, dash)) in legend.into_iter().enumerate() {
        let left = 60.0 + 260.0 * index as f64;
        let _ = writeln!(
            svg,
            "<path d=\"M{left} 310h28\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"/>"
        );
        let _ = writeln!(svg, "<text x=\"{}\" y=\"314\">{name}</text>", left + 36.0);
    }
    let _ = writeln!(
        svg,
        "<text x=\"1010\" y=\"314\" text-anchor=\"end\" fill=\"#57606a\">x: offered load, share of the capacity</text>"
    );
    svg + "</svg>\n"
}
