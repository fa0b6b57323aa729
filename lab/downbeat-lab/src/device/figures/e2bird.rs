//! E²bird's tables and figures.

use downbeat_core::Duration;
use downbeat_core::device::LaneMix;
use downbeat_report::{Axis, Line, Scale, bars as chart, lines};

use super::{DeviceFailure, Figure, FigureOptions, SERVERS, change, each, found_peak, head, mean, row, summary, tuned};
use crate::device::{
    Architecture, DeviceLoad, DevicePolicyName, DeviceReport, DeviceSimulation, EmulatedModel, Peak, Platform, Tuning,
    best_mixes, measure_mix, measure_mixes,
};
use downbeat_sim::Arrivals;
use downbeat_sim::Pace;

/// The QoS target (§8.2).
pub(super) const QOS: Duration = Duration::from_millis(200);
/// The largest batch (§8.1).
pub(super) const MAX_BATCH: u32 = 32;
/// E²bird's models (table 5).
pub(super) const MODELS: [Architecture; 6] = [
    Architecture::InceptionV4,
    Architecture::ResNet50,
    Architecture::ResNet101,
    Architecture::ResNet152,
    Architecture::Vgg16,
    Architecture::Vgg19,
];
const COMPARED: [DevicePolicyName; 3] = [DevicePolicyName::OptWait, DevicePolicyName::NEbird, DevicePolicyName::EEbird];

pub(super) fn emulated(architecture: Architecture) -> EmulatedModel {
    EmulatedModel::new(architecture, Platform::TITAN_CUDNN)
}

fn with_mixes(model: &EmulatedModel) -> Result<Tuning, DeviceFailure> {
    let mixes = best_mixes(model, MAX_BATCH);
    Ok(Tuning { mixes, ..Tuning::new(model, MAX_BATCH)? })
}

pub(super) fn table_1(_: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let published = [
        (Architecture::ResNet50, [6.8, 12.1, 21.5, 40.1]),
        (Architecture::ResNet101, [11.8, 20.6, 36.2, 65.4]),
        (Architecture::ResNet152, [17.3, 29.2, 49.5, 93.7]),
    ];
    let mut table = vec![head("model | batch | paper ms | here ms | off | here req/s")];
    for (architecture, latencies) in published {
        for (batch, latency) in [4u32, 8, 16, 32].into_iter().zip(latencies) {
            let found = emulated(architecture).time(batch, 0).as_millis_f64();
            let rate = f64::from(batch) / found * 1e3;
            let cells = [batch.to_string(), latency.to_string(), format!("{found:.1}"), change(found, latency)];
            table.push([vec![architecture.to_string()], cells.to_vec(), vec![format!("{rate:.0}")]].concat());
        }
    }
    Ok(Figure {
        note: "Computed from the networks' operators and the platform's constants.".to_owned(),
        table,
        ..Figure::default()
    })
}

/// Bursts of some hundred requests are short, so their means are taken over several seeds: 20 at
/// the default number of requests.
fn seeds(options: &FigureOptions) -> u64 {
    (options.requests / 300).max(1)
}

pub(super) fn figure_2(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (steps, each_step) = (7u32, 150u32);
    let policies = [DevicePolicyName::NoWait, DevicePolicyName::OptWait, DevicePolicyName::Static];
    let model = emulated(Architecture::ResNet152);
    let plain = Tuning { window: Duration::from_millis(30), ..Tuning::new(&model, MAX_BATCH)? };
    let pace = Pace::rising(20.0, 320.0, f64::from(each_step), steps).unwrap_or_default();
    let load = DeviceLoad { pace, ..DeviceLoad::steady(1.0, u64::from(steps * each_step), None) };
    let simulation = DeviceSimulation { warm_up: 0, ..DeviceSimulation::new(model, load, QOS, options.seed) };
    let cases: Vec<_> = SERVERS.into_iter().flat_map(|(_, ahead)| policies.map(|policy| (ahead, policy))).collect();
    let reports = each(&cases, options, |(ahead, policy)| {
        let tuning = Tuning { ahead: *ahead, ..plain.clone() };
        let of_seed = |seed| {
            let simulation = DeviceSimulation { seed: options.seed + seed, ..simulation.clone() };
            Ok(simulation.run(tuning.policy(*policy)?)?)
        };
        (0..seeds(options)).map(of_seed).collect::<Result<Vec<_>, DeviceFailure>>()
    })?;
    let mut heads = row(&["requests", "rate/s"]);
    heads.extend(cases.iter().map(|(ahead, policy)| format!("{policy} {ahead} ahead, ms")));
    heads.extend(SERVERS.map(|(_, ahead)| format!("seeds with opt-wait first, {ahead} ahead")));
    let mut table = vec![heads];
    for step in 0..steps {
        let first = (step * each_step) as usize;
        let end = first + each_step as usize;
        let rate = 20.0 + 300.0 * f64::from(step) / f64::from(steps - 1);
        let means: Vec<Vec<f64>> =
            reports.iter().map(|seeds| seeds.iter().map(|report| report.mean_ms_of(first, end)).collect()).collect();
        let mut cells = vec![format!("{first}..{end}"), format!("{rate:.0}")];
        cells.extend(means.iter().map(|seeds| format!("{:.1}", mean(seeds.iter().copied()))));
        // By server: its policies' means of each seed.
        cells.extend(means.chunks(policies.len()).map(|of_server| {
            let ahead = of_server[0].iter().zip(&of_server[1]).filter(|(no_wait, opt_wait)| opt_wait < no_wait);
            format!("{} of {}", ahead.count(), of_server[0].len())
        }));
        table.push(cells);
    }
    let plots = reports.chunks(policies.len()).zip(SERVERS).map(|(reports, (server, _))| {
        let first: Vec<DeviceReport> = reports.iter().filter_map(|seeds| seeds.first().cloned()).collect();
        latencies(&format!("Latency in the order of arrival, {server}"), &policies, &first)
    });
    let note = format!(
        "ResNet152, batches of at most 32, OPT_Wait's window 30 ms as in the paper; the rate rises every 150 requests; means of {} seeds. One batch ahead: {}; \
         none: {}.",
        seeds(options),
        SERVERS[0].0,
        SERVERS[1].0
    );
    Ok(Figure { note, table, plots: plots.collect(), ..Figure::default() })
}

fn latencies(title: &str, policies: &[DevicePolicyName], reports: &[DeviceReport]) -> String {
    let line = |(policy, report): (&DevicePolicyName, &DeviceReport)| Line {
        name: policy.name(),
        points: report.latencies_ms.iter().enumerate().map(|(id, latency)| (id as f64, *latency)).collect(),
        stepped: false,
    };
    let drawn: Vec<Line<'_>> = policies.iter().zip(reports).map(line).collect();
    let axis = |label| Axis { label, scale: Scale::Linear };
    lines(title, "Latency of each request.", &axis("request"), &axis("latency (ms)"), &drawn)
}

/// Table 4's mixes, by the number of items.
const PUBLISHED_MIXES: [(u32, &str); 4] = [(4, "4"), (8, "8"), (16, "4,4,8"), (32, "8,8,16")];

pub(super) fn table_4(_: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let model = emulated(Architecture::ResNet152);
    let mut table = vec![head("items | mix | rank | mean ms | last ms | ")];
    for (total, published) in PUBLISHED_MIXES {
        let measured = measure_mixes(&model, total);
        let one = LaneMix::new(&[total]);
        for (rank, found) in measured.iter().enumerate() {
            let name = found.mix.to_string();
            let mut why = Vec::new();
            if rank < 3 {
                why.push("among the best");
            }
            if name == published {
                why.push("the paper's best");
            }
            if one.as_ref() == Ok(&found.mix) {
                why.push("one batch");
            }
            if rank + 1 == measured.len() {
                why.push("the worst");
            }
            if !why.is_empty() {
                let mean = format!("{:.1}", found.mean.as_millis_f64());
                let last = format!("{:.1}", found.last.as_millis_f64());
                let mix = if name.len() > 24 { format!("{} of 1", found.mix.count(1)) } else { name };
                let rank = format!("{} of {}", rank + 1, measured.len());
                table.push(vec![total.to_string(), mix, rank, mean, last, why.join(", ")]);
            }
        }
    }
    let small = measure_mix(&model, &LaneMix::naive(MAX_BATCH)).mean.as_millis_f64();
    let note = format!(
        "ResNet152; all batches of a mix start at once, their ends are averaged. The paper: 85.3 ms for 8,8,16 against 93.7 ms for one batch of 32, \
         and about four times the best for the worst. N-Ebird's mix takes {small:.1} ms."
    );
    Ok(Figure { note, table, ..Figure::default() })
}

/// The low load, as a share of TF-Serving's highest rate.
const LOW: f64 = 0.1;

/// The mean latencies of OPT_Wait, N-Ebird and E-Ebird.
type Means = [f64; COMPARED.len()];

/// Returns the model's low and high rate on a server that makes `ahead` batches ahead, the window,
/// and the mean latencies at both rates.
fn low_and_high(
    architecture: Architecture,
    ahead: u32,
    options: &FigureOptions,
) -> Result<([f64; 2], Duration, [Means; 2]), DeviceFailure> {
    let (first, second) = (150u32, 250u32);
    let model = emulated(architecture);
    let steady = DeviceLoad::steady(1.0, options.requests, None);
    let mut simulation = DeviceSimulation::new(model, steady, QOS, options.seed);
    let (tuning, high) = tuned(&simulation, &with_mixes(&simulation.model)?, ahead)?;
    let low = high * LOW;
    let stretch = |requests: u32, rate: f64| (Duration::from_secs_f64(f64::from(requests) / rate), rate);
    // The last stretch is long enough for the last request under any seed.
    let pace = Pace::new(vec![stretch(first, low), stretch(second * 4, high)]).unwrap_or_default();
    let mut means = [[0.0; COMPARED.len()]; 2];
    let seeds = seeds(options);
    for seed in 0..seeds {
        let requests = u64::from(first + second);
        let load = DeviceLoad { pace: pace.clone(), ..DeviceLoad::steady(1.0, requests, None) };
        simulation = DeviceSimulation { load, warm_up: 0, seed: options.seed + seed, ..simulation };
        for (index, policy) in COMPARED.into_iter().enumerate() {
            let report = simulation.run(tuning.policy(policy)?)?;
            means[0][index] += report.mean_ms_of(0, first as usize) / seeds as f64;
            means[1][index] += report.mean_ms_of(first as usize, (first + second) as usize) / seeds as f64;
        }
    }
    Ok(([low, high], tuning.window, means))
}

pub(super) fn figure_13(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let cases: Vec<_> = SERVERS.into_iter().flat_map(|(_, ahead)| MODELS.map(|model| (ahead, model))).collect();
    let runs = each(&cases, options, |(ahead, architecture)| low_and_high(*architecture, *ahead, options))?;
    let mut table = vec![head(
        "server | model | load | rate/s | window ms | opt-wait ms | n-ebird ms | e-ebird ms | n-ebird | e-ebird | e over n",
    )];
    let names = MODELS.map(Architecture::name);
    let mut plots = Vec::new();
    for ((server, _), runs) in SERVERS.into_iter().zip(runs.chunks(MODELS.len())) {
        for (load, name) in ["low", "high"].into_iter().enumerate() {
            let mut bars = Vec::new();
            for (architecture, (rates, window, means)) in MODELS.iter().zip(runs) {
                let [windowed, naive, enhanced] = means[load];
                let mut cells = vec![server.to_owned(), architecture.to_string(), name.to_owned()];
                cells.extend([format!("{:.0}", rates[load]), format!("{:.1}", window.as_millis_f64())]);
                cells.extend(means[load].map(|ms| format!("{ms:.1}")));
                cells.extend([change(naive, windowed), change(enhanced, windowed), change(enhanced, naive)]);
                table.push(cells);
                bars.push((architecture.to_string(), means[load].to_vec()));
            }
            let ratios = |a: usize, b: usize| runs.iter().map(|(.., means)| means[load][a] / means[load][b]).collect();
            for (label, changes) in summary(&names, &[ratios(1, 0), ratios(2, 0), ratios(2, 1)]) {
                table.push([row(&[server, label, name, "", "", "", "", ""]), changes].concat());
            }
            let policies = COMPARED.map(|policy| policy.name().to_owned());
            plots.push(chart(
                &format!("Mean latency at {name} load, {server}"),
                "By model.",
                "",
                "ms",
                &policies,
                &bars,
            ));
        }
    }
    let note = format!(
        "150 requests at a tenth of what OPT_Wait holds, then 250 at what it holds; means of {} seeds. OPT_Wait's window is the one that holds most. \
         The paper: N-Ebird -44.6% to -70.9% at low load, -7.4% to -53.1% at high; E-Ebird a further 5% to 30% at high.",
        seeds(options)
    );
    Ok(Figure { note, table, plots, ..Figure::default() })
}

/// Returns the peaks of OPT_Wait on each server, N-Ebird and E-Ebird for a model, with the windows
/// and the mixes.
fn peaks(
    architecture: Architecture,
    arrivals: Arrivals,
    options: &FigureOptions,
) -> Result<([Peak; 4], String, String), DeviceFailure> {
    let load = DeviceLoad { arrivals, ..DeviceLoad::steady(1.0, options.requests, None) };
    let simulation = DeviceSimulation::new(emulated(architecture), load, QOS, options.seed);
    let tuning = with_mixes(&simulation.model)?;
    let on = |ahead: u32| -> Result<(Peak, f64), DeviceFailure> {
        let (tuning, _) = tuned(&simulation, &tuning, ahead)?;
        Ok((found_peak(&simulation, &tuning, DevicePolicyName::OptWait)?, tuning.window.as_millis_f64()))
    };
    let [(paper, window), (today, other)] = [on(SERVERS[0].1)?, on(SERVERS[1].1)?];
    let [naive, enhanced] =
        [DevicePolicyName::NEbird, DevicePolicyName::EEbird].map(|policy| found_peak(&simulation, &tuning, policy));
    let mixes: Vec<String> = tuning.mixes.iter().map(|(total, mix)| format!("{total}: {mix}")).collect();
    Ok(([paper, today, naive?, enhanced?], format!("{window:.0}, {other:.0}"), mixes.join("; ")))
}

pub(super) fn figure_14(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let cases: Vec<_> =
        [Arrivals::Constant, Arrivals::Poisson].into_iter().flat_map(|a| MODELS.map(|model| (a, model))).collect();
    let runs = each(&cases, options, |(arrivals, architecture)| peaks(*architecture, *arrivals, options))?;
    let mut table = vec![head(
        "arrivals | model | windows ms | the paper's server/s | today's/s | n-ebird/s | e-ebird/s | n to paper's | n to today's | e to paper's | e to today's | e over n | units used |  |  |  | mixes of e-ebird",
    )];
    let names = MODELS.map(Architecture::name);
    let mut plots = Vec::new();
    for (cases, runs) in cases.chunks(MODELS.len()).zip(runs.chunks(MODELS.len())) {
        // The compared rates, by column.
        let pairs = [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)];
        let mut bars = Vec::new();
        for ((arrivals, architecture), (peaks, windows, mixes)) in cases.iter().zip(runs) {
            let rates: Vec<f64> = peaks.iter().map(|peak| peak.rate).collect();
            let mut cells = vec![arrivals.to_string(), architecture.to_string(), windows.clone()];
            cells.extend(rates.iter().map(|rate| format!("{rate:.0}")));
            cells.extend(pairs.map(|(a, b)| change(rates[a], rates[b])));
            cells.extend(peaks.iter().map(|peak| format!("{:.0}%", peak.report.utilisation * 100.0)));
            cells.push(mixes.clone());
            table.push(cells);
            bars.push((architecture.to_string(), rates));
        }
        let ratios = pairs.map(|(a, b)| runs.iter().map(|(peaks, ..)| peaks[a].rate / peaks[b].rate).collect());
        for (label, changes) in summary(&names, &ratios) {
            table.push([vec![cases[0].0.to_string()], row(&[label, "", "", "", "", ""]), changes].concat());
        }
        let heads = ["the paper's server", "today's", "n-ebird", "e-ebird"].map(str::to_owned);
        let title = format!("Throughput within 200 ms, {} arrivals", cases[0].0);
        plots.push(chart(&title, "By model and policy.", "", "requests/s", &heads, &bars));
    }
    let note = "Highest steady rate at which 99% are answered within 200 ms, OPT_Wait with the window that holds most; the paper's load is stable, without bursts. \
                The paper: N-Ebird +34.4% on average, E-Ebird a further 9.9%.";
    Ok(Figure { note: note.to_owned(), table, plots, ..Figure::default() })
}
