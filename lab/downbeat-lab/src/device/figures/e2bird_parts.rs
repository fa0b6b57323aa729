//! E²bird's parts on their own: copies beside computing, mixes of lanes, memory, and the host's cost
//! that the headlines would need.

use downbeat_core::Duration;
use downbeat_core::device::LaneMix;

use super::e2bird::{MAX_BATCH, MODELS, QOS, emulated};
use super::{DeviceFailure, Figure, FigureOptions, change, each, found_peak, head, mean, tuned};
use crate::device::{
    Architecture, DeviceLoad, DevicePolicyName, DeviceSimulation, EmulatedModel, MeasuredMix, Platform, Tuning,
    best_mixes, measure_mix,
};

const PLATFORM: Platform = Platform::TITAN_CUDNN;

/// Returns the time to bring `items` inputs to the device in `copies` copies.
fn copying(architecture: Architecture, items: u32, copies: u32) -> Duration {
    let bytes = architecture.item_bytes(0).0 * u64::from(items);
    PLATFORM.copy_fixed.saturating_mul(u64::from(copies))
        + Duration::from_secs_f64(bytes as f64 / PLATFORM.copy_bandwidth)
}

/// Equation 1: the bound on what copies beside computing can gain.
pub(super) fn equation_1(_: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let mut table = vec![head(
        "model | copy ms | copy, joining and server ms | computing ms | lambda | bound of the gain | speed for +34.4%, GB/s | for +47.4% | for +62.8%",
    )];
    for architecture in MODELS {
        let model = emulated(architecture);
        let bytes = architecture.item_bytes(0).0 * u64::from(MAX_BATCH);
        let copy = copying(architecture, MAX_BATCH, 1);
        let (host, computing) = ((copy + model.gather(bytes)).as_secs_f64(), model.time(MAX_BATCH, 0).as_secs_f64());
        let speed = |gain: f64| format!("{:.2}", bytes as f64 / (gain * computing) / 1e9);
        let cells = [
            architecture.to_string(),
            format!("{:.1}", copy.as_millis_f64()),
            format!("{:.1}", host * 1e3),
            format!("{:.1}", computing * 1e3),
            format!("{:.3}", host / (host + computing)),
            change(host + computing, computing),
            speed(0.344),
            speed(0.474),
            speed(0.628),
        ];
        table.push(cells.to_vec());
    }
    let note = "Batches of 32. Lambda is the share of the time that copies take (§5.2); hidden completely they gain t_T / t_C. The last columns: the speed of all of the host's work for an input, with which equation 1 allows the gain. Here copies run at 3 GB/s and joining at 5 GB/s.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

/// The fragments of figure 7.
const FRAGMENTS: [u32; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
const PICTURES: u32 = 256;

pub(super) fn figure_7(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let architecture = Architecture::ResNet50;
    let rows = each(&FRAGMENTS, options, |fragments| {
        let lanes = vec![PICTURES / fragments; *fragments as usize];
        let mix = LaneMix::new(&lanes).map_err(|error| DeviceFailure(error.to_string()))?;
        let computing = measure_mix(&emulated(architecture), &mix).last;
        Ok((copying(architecture, PICTURES, *fragments), computing))
    })?;
    let mut table = vec![head("fragments | copying ms | to one | computing ms | to one")];
    let first = rows.first().copied().unwrap_or_default();
    for (fragments, (copying, computing)) in FRAGMENTS.iter().zip(&rows) {
        let mut cells = vec![fragments.to_string()];
        for (time, one) in [(copying, first.0), (computing, first.1)] {
            cells.extend([format!("{:.1}", time.as_millis_f64()), change(time.as_secs_f64(), one.as_secs_f64())]);
        }
        table.push(cells);
    }
    let note = "256 pictures, copied in fragments, and computed by as many lanes at once. ResNet50 stands for the paper's FakeNet, whose shape is not given. The paper: copies differ by less than 1 ms in all; computing takes the same up to 64 lanes, and longer with 128 and 256.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

pub(super) fn figure_11(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let found = each(&MODELS, options, |architecture| {
        let model = emulated(*architecture);
        let mean_of = |mix: &LaneMix| measure_mix(&model, mix);
        let row = |(total, best): (u32, LaneMix)| {
            let one = LaneMix::new(&[total]).map_err(|error| DeviceFailure(error.to_string()))?;
            Ok((total, mean_of(&best), mean_of(&one), mean_of(&LaneMix::naive(total))))
        };
        best_mixes(&model, MAX_BATCH).into_iter().map(row).collect::<Result<Vec<_>, DeviceFailure>>()
    })?;
    let mut table = vec![head(
        "model | items | best mix | mean ms | to one batch | to N-Ebird's lanes | last ms | to one batch | to N-Ebird's lanes",
    )];
    for (architecture, rows) in MODELS.iter().zip(found) {
        for (total, best, one, naive) in rows {
            let mut cells = vec![architecture.to_string(), total.to_string(), best.mix.to_string()];
            let both: [fn(&MeasuredMix) -> Duration; 2] = [|measured| measured.mean, |measured| measured.last];
            for of in both {
                let ms = |measured: &MeasuredMix| of(measured).as_millis_f64();
                cells.extend([format!("{:.1}", ms(&best)), change(ms(&best), ms(&one)), change(ms(&best), ms(&naive))]);
            }
            table.push(cells);
        }
    }
    let note = "All batches of a mix start at once. The mean of their ends decides which is best, as in the paper. Throughput follows the end of the last batch: what E-Ebird can hold beyond N-Ebird is the last column, where a full device has nothing else to do.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

const MIB: f64 = 1024.0 * 1024.0;

/// Returns three sizes of a network in bytes: all weights, the outputs of all operators for an
/// item, and the inputs and outputs of the operator that has most.
fn memory(architecture: Architecture) -> [f64; 3] {
    let operators = architecture.operators(true, 1);
    let bytes = |elements: u64| elements as f64 * 4.0;
    let weights = operators.iter().map(|operator| operator.weights).sum();
    let all = operators.iter().map(|operator| operator.outputs).sum();
    let most = operators.iter().map(|operator| operator.inputs + operator.outputs).max();
    [bytes(weights), bytes(all), bytes(most.unwrap_or(0))]
}

pub(super) fn figure_17(_: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let lanes: Vec<u32> = LaneMix::naive(MAX_BATCH).sizes().collect();
    let items = f64::from(lanes.iter().sum::<u32>());
    let mut table = vec![head(
        "model | weights MiB | an item, unplanned | planned | NM-Ebird | TF-Serving | N-Ebird | to NM-Ebird | to TF-Serving",
    )];
    let (mut to_nm, mut to_tf) = (Vec::new(), Vec::new());
    for architecture in MODELS {
        let [weights, all, most] = memory(architecture);
        let duplicated = weights * lanes.len() as f64 + items * all;
        let serving = weights + f64::from(MAX_BATCH) * all;
        let ours = weights + items * most;
        to_nm.push(ours / duplicated);
        to_tf.push(ours / serving);
        let mut cells = vec![architecture.to_string()];
        cells.extend([weights, all, most, duplicated, serving, ours].map(|bytes| format!("{:.1}", bytes / MIB)));
        cells.extend([change(ours, duplicated), change(ours, serving)]);
        table.push(cells);
    }
    let mut cells = vec!["mean".to_owned()];
    cells.extend(vec![String::new(); 6]);
    cells.extend([to_nm, to_tf].map(|ratios| change(mean(ratios.into_iter()), 1.0)));
    table.push(cells);
    let note = "Computed from the networks' operators, pointwise ones fused. NM-Ebird has weights and all activations for each lane of N-Ebird (1, 1, 2, 4, 8, 16), TF-Serving for one batch of 32. N-Ebird shares the weights, and an activation's memory is used again once no operator reads it. Of Inception's branches only the one at work counts. The paper: -64.8% to NM-Ebird, -59.4% to TF-Serving.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

/// Factors of the host's work for a byte of a batch that a one-batch server brings to the device.
const SLOWER: [f64; 5] = [1.0, 1.5, 2.0, 3.0, 4.0];

/// The peak gains if the host's work for an input were slower than assumed.
pub(super) fn host(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let cases: Vec<_> =
        SLOWER.into_iter().flat_map(|slower| MODELS.map(|architecture| (slower, architecture))).collect();
    let gains = each(&cases, options, |(slower, architecture)| {
        let platform = Platform {
            gather_nanos_per_byte: PLATFORM.gather_nanos_per_byte * slower,
            copy_bandwidth: PLATFORM.copy_bandwidth / slower,
            ..PLATFORM
        };
        let model = EmulatedModel::new(*architecture, platform);
        let tuning = Tuning { mixes: best_mixes(&model, MAX_BATCH), ..Tuning::new(&model, MAX_BATCH)? };
        let simulation =
            DeviceSimulation::new(model, DeviceLoad::steady(1.0, options.requests, None), QOS, options.seed);
        // The paper's server makes a batch ahead.
        let (_, windowed) = tuned(&simulation, &tuning, 1)?;
        let held = |policy| found_peak(&simulation, &tuning, policy).map(|peak| peak.rate / windowed);
        Ok([held(DevicePolicyName::NEbird)?, held(DevicePolicyName::EEbird)?])
    })?;
    let mut heads = head("host's work for a byte");
    heads.extend(MODELS.map(|architecture| architecture.to_string()));
    heads.extend(head("N-Ebird, mean | most | E-Ebird, mean | most"));
    let mut table = vec![heads];
    for (slower, gains) in SLOWER.iter().zip(gains.chunks(MODELS.len())) {
        let mut cells = vec![format!("{slower} times")];
        cells.extend(gains.iter().map(|[naive, _]| change(*naive, 1.0)));
        for policy in [0, 1] {
            let ratios = || gains.iter().map(|of| of[policy]);
            cells.extend([change(mean(ratios()), 1.0), change(ratios().fold(0.0, f64::max), 1.0)]);
        }
        table.push(cells);
    }
    let note = "Peaks within 200 ms to those of the paper's server with the window that holds most, where copies and joining take this many times as long. The paper: N-Ebird +34.4% on average, E-Ebird +47.4%, +62.8% at most.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}
