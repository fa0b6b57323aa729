//! E²bird's tables and figures.

use downbeat_core::Duration;
use downbeat_core::device::LaneMix;
use downbeat_report::{Axis, Line, Scale, bars as chart, lines};

use super::{DeviceFailure, Figure, FigureOptions, change, each, found_peak, head, mean, row};
use crate::arrivals::Arrivals;
use crate::device::{
    Architecture, DeviceLoad, DevicePolicyName, DeviceReport, DeviceSimulation, EmulatedModel, Platform, Tuning,
    best_mixes, measure_mix, measure_mixes,
};
use crate::pace::Pace;

/// §8.2.
const QOS: Duration = Duration::from_millis(200);
/// §8.1.
const MAX_BATCH: u32 = 32;
/// Table 5.
const MODELS: [Architecture; 6] = [
    Architecture::InceptionV4,
    Architecture::ResNet50,
    Architecture::ResNet101,
    Architecture::ResNet152,
    Architecture::Vgg16,
    Architecture::Vgg19,
];
const COMPARED: [DevicePolicyName; 3] = [DevicePolicyName::OptWait, DevicePolicyName::NEbird, DevicePolicyName::EEbird];

fn emulated(architecture: Architecture) -> EmulatedModel {
    EmulatedModel::new(architecture, Platform::TITAN_CUDNN)
}

fn tuned(model: &EmulatedModel) -> Result<Tuning, DeviceFailure> {
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

pub(super) fn figure_2(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (steps, each_step) = (7u32, 150u32);
    let policies = [DevicePolicyName::NoWait, DevicePolicyName::OptWait, DevicePolicyName::Static];
    let model = emulated(Architecture::ResNet152);
    let tuning = Tuning { window: Duration::from_millis(30), ..Tuning::new(&model, MAX_BATCH)? };
    let pace = Pace::rising(20.0, 320.0, f64::from(each_step), steps).unwrap_or_default();
    let requests = u64::from(steps * each_step);
    let load = DeviceLoad { pace, ..DeviceLoad::steady(1.0, requests, None) };
    let simulation = DeviceSimulation { warm_up: 0, ..DeviceSimulation::new(model, load, QOS, options.seed) };
    let reports = each(&policies, options, |policy| Ok(simulation.run(tuning.policy(*policy)?)?))?;
    let names: Vec<String> = policies.iter().map(|policy| format!("{policy} mean ms")).collect();
    let mut table = vec![[row(&["requests", "rate/s"]), names].concat()];
    for step in 0..steps {
        let first = (step * each_step) as usize;
        let range = first..first + each_step as usize;
        let rate = 20.0 + 300.0 * f64::from(step) / f64::from(steps - 1);
        let means = reports.iter().map(|report| format!("{:.1}", report.mean_ms_of(range.start, range.end)));
        let mut cells = vec![format!("{first}..{}", range.end), format!("{rate:.0}")];
        cells.extend(means);
        table.push(cells);
    }
    let plot = latencies("Latency in the order of arrival", &policies, &reports);
    let note =
        "ResNet152, batches of at most 32, OPT_Wait's window 30 ms as in the paper; the rate rises every 150 requests.";
    Ok(Figure { note: note.to_owned(), table, plots: vec![plot], ..Figure::default() })
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

/// Table 4's mixes, by what they serve.
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

/// Low load, as a share of what TF-Serving holds.
const LOW: f64 = 0.1;

pub(super) fn figure_13(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (first, second) = (150u32, 250u32);
    let runs = each(&MODELS, options, |architecture| {
        let model = emulated(*architecture);
        let tuning = tuned(&model)?;
        let steady = DeviceLoad::steady(1.0, options.requests, None);
        let mut simulation = DeviceSimulation::new(model, steady, QOS, options.seed);
        let high = found_peak(&simulation, &tuning, DevicePolicyName::OptWait)?.rate;
        let low = high * LOW;
        let stretch = |requests: u32, rate: f64| (Duration::from_secs_f64(f64::from(requests) / rate), rate);
        // The last stretch is long enough for the last request, whatever the luck.
        let pace = Pace::new(vec![stretch(first, low), stretch(second * 4, high)]).unwrap_or_default();
        let mut means = vec![[0.0; 2]; COMPARED.len()];
        for seed in 0..SEEDS {
            let requests = u64::from(first + second);
            let load = DeviceLoad { pace: pace.clone(), ..DeviceLoad::steady(1.0, requests, None) };
            simulation = DeviceSimulation { load, warm_up: 0, seed: options.seed + seed, ..simulation };
            for (policy, means) in COMPARED.iter().zip(&mut means) {
                let report = simulation.run(tuning.policy(*policy)?)?;
                means[0] += report.mean_ms_of(0, first as usize) / SEEDS as f64;
                means[1] += report.mean_ms_of(first as usize, (first + second) as usize) / SEEDS as f64;
            }
        }
        Ok((low, high, means))
    })?;
    let mut table =
        vec![head("model | load | rate/s | opt-wait ms | n-ebird ms | e-ebird ms | n-ebird | e-ebird | e over n")];
    let mut bars = Vec::new();
    for (load, name) in ["low", "high"].into_iter().enumerate() {
        for (architecture, (low, high, means)) in MODELS.iter().zip(&runs) {
            let [windowed, naive, enhanced] = [means[0][load], means[1][load], means[2][load]];
            let rate = if load == 0 { low } else { high };
            let mut cells = vec![architecture.to_string(), name.to_owned(), format!("{rate:.0}")];
            cells.extend([windowed, naive, enhanced].map(|ms| format!("{ms:.1}")));
            cells.extend([change(naive, windowed), change(enhanced, windowed), change(enhanced, naive)]);
            table.push(cells);
            bars.push((format!("{architecture} {name}"), vec![windowed, naive, enhanced]));
        }
        let reduction = |policy: usize| mean(runs.iter().map(|(_, _, means)| means[policy][load] / means[0][load]));
        let over = mean(runs.iter().map(|(_, _, means)| means[2][load] / means[1][load]));
        let changes = [change(reduction(1), 1.0), change(reduction(2), 1.0), change(over, 1.0)];
        table.push([row(&["mean", name, "", "", "", ""]), changes.to_vec()].concat());
    }
    let names = COMPARED.map(|policy| policy.name().to_owned());
    let plots =
        bars.chunks(MODELS.len()).map(|part| chart("Mean latency", "By model and policy.", "", "ms", &names, part));
    let note = format!(
        "150 requests at a tenth of what OPT_Wait holds, then 250 at what it holds; means of {SEEDS} seeds. OPT_Wait's window is 32% of what a batch of 32 takes: \
         30 ms for ResNet152, as in the paper. The paper: N-Ebird -44.6% to -70.9% at low load, -7.4% to -53.1% at high; E-Ebird a further 5% to 30% at high."
    );
    Ok(Figure { note, table, plots: plots.collect(), ..Figure::default() })
}

/// Bursts of 400 requests are short: their means are taken over so many seeds.
const SEEDS: u64 = 20;

pub(super) fn figure_14(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let tunings = each(&MODELS, options, |architecture| Ok((*architecture, tuned(&emulated(*architecture))?)))?;
    let cases: Vec<_> = [Arrivals::Constant, Arrivals::Poisson]
        .into_iter()
        .flat_map(|arrivals| tunings.iter().map(move |tuning| (arrivals, tuning)))
        .collect();
    let runs = each(&cases, options, |(arrivals, (architecture, tuning))| {
        let load = DeviceLoad { arrivals: *arrivals, ..DeviceLoad::steady(1.0, options.requests, None) };
        let simulation = DeviceSimulation::new(emulated(*architecture), load, QOS, options.seed);
        let peaks = COMPARED.map(|policy| found_peak(&simulation, tuning, policy));
        let [windowed, naive, enhanced] = peaks;
        let mixes: Vec<String> = tuning.mixes.iter().map(|(total, mix)| format!("{total}: {mix}")).collect();
        Ok(([windowed?, naive?, enhanced?], mixes.join("; ")))
    })?;
    let mut table = vec![head(
        "arrivals | model | opt-wait/s | n-ebird/s | e-ebird/s | n-ebird | e-ebird | e over n | units used |  |  | mixes of e-ebird",
    )];
    let mut plots = Vec::new();
    for (cases, runs) in cases.chunks(MODELS.len()).zip(runs.chunks(MODELS.len())) {
        let mut bars = Vec::new();
        for ((arrivals, (architecture, _)), (peaks, mixes)) in cases.iter().zip(runs) {
            let rates = [peaks[0].rate, peaks[1].rate, peaks[2].rate];
            let mut cells = vec![arrivals.to_string(), architecture.to_string()];
            cells.extend(rates.map(|rate| format!("{rate:.0}")));
            cells.extend([change(rates[1], rates[0]), change(rates[2], rates[0]), change(rates[2], rates[1])]);
            cells.extend(peaks.iter().map(|peak| format!("{:.0}%", peak.report.utilisation * 100.0)));
            cells.push(mixes.clone());
            table.push(cells);
            bars.push((architecture.to_string(), rates.to_vec()));
        }
        let ratio = |a: usize, b: usize| mean(runs.iter().map(|(peaks, _)| peaks[a].rate / peaks[b].rate));
        let changes = [(1, 0), (2, 0), (2, 1)].map(|(a, b)| change(ratio(a, b), 1.0));
        table.push([vec![cases[0].0.to_string()], row(&["mean", "", "", ""]), changes.to_vec()].concat());
        let names = COMPARED.map(|policy| policy.name().to_owned());
        let title = format!("Throughput within 200 ms, {} arrivals", cases[0].0);
        plots.push(chart(&title, "By model and policy.", "", "requests/s", &names, &bars));
    }
    let note = "Highest steady rate at which 99% are answered within 200 ms; the paper's load is stable, without bursts. The paper: N-Ebird +34.4% on average, \
                E-Ebird a further 9.9%.";
    Ok(Figure { note: note.to_owned(), table, plots, ..Figure::default() })
}
