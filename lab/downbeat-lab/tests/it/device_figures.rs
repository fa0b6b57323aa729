//! The papers' figures on the emulated device in short runs. Some claims hold and some do not:
//! lab/docs/e2bird.md and dvabatch.md.

use downbeat_core::Duration;
use downbeat_lab::device::{
    Architecture, DeviceLoad, DevicePolicyName, DeviceReport, DeviceSimulation, EmulatedModel, Figure, FigureOptions,
    Glue, Platform, Tuning,
};

fn make(name: &str, requests: u64) -> Figure {
    Figure::make(name, &FigureOptions { requests, ..FigureOptions::default() }).unwrap()
}

fn number(figure: &Figure, row: usize, column: usize) -> f64 {
    figure.table[row][column].parse().unwrap()
}

/// ResNet152, one batch at a time: 220 requests/s are more than NO_Wait's small batches serve,
/// because no request joins a running batch.
#[test]
fn e2bird_figure_2_opt_wait_overtakes_no_wait_where_a_batch_is_made_ahead() {
    // This test uses one seed.
    let figure = make("e2bird-2", 300);
    let row = |row: usize| [2, 3, 4, 5, 6, 7].map(|column| number(&figure, row, column));
    let [frozen, frozen_opt, frozen_static, no_wait, opt_wait, fixed] = row(1);
    assert!(frozen < frozen_opt && frozen_opt < frozen_static, "NO_Wait is fastest at low load: {figure}");
    assert!(no_wait < opt_wait && opt_wait < fixed, "on today's server too: {figure}");
    let [frozen, frozen_opt, _, no_wait, opt_wait, _] = row(5);
    assert!(frozen_opt < frozen && no_wait < opt_wait, "but at 220/s on the paper's alone: {figure}");
    assert!(row(7)[3] > 2.0 * row(1)[3], "the load shows: {figure}");
    assert!(figure.page().contains("<svg"), "with a plot");
}

#[test]
fn e2bird_table_1_has_every_row_of_the_paper() {
    assert_eq!(make("e2bird-table-1", 100).table.len(), 13);
}

#[test]
fn dvabatch_figure_21_stages_cost_one_request_little() {
    let figure = make("dvabatch-21", 100);
    for row in 1..=6 {
        let more = number(&figure, row, 3);
        // Launches deviate from run to run.
        assert!((-0.05..0.5).contains(&more), "{figure}");
    }
}

/// Runs a model under a policy at a rate, on a server that makes this many batches ahead.
fn run(
    platform: Platform,
    architecture: Architecture,
    policy: DevicePolicyName,
    ahead: u32,
    rate: f64,
    requests: u64,
) -> DeviceReport {
    let model =
        EmulatedModel::staged(architecture, platform, policy.stages(&EmulatedModel::new(architecture, platform)));
    let model = model.unwrap();
    let max_batch = if platform == Platform::TITAN_CUDNN { 32 } else { 64 };
    let tuning = Tuning { ahead, ..Tuning::new(&model, max_batch).unwrap() };
    let load = DeviceLoad::steady(rate, requests, architecture.has_length().then_some(Glue::Rte));
    let simulation = DeviceSimulation::new(model, load, Duration::from_millis(200), 1);
    simulation.run(tuning.policy(policy).unwrap()).unwrap()
}

fn cudnn(architecture: Architecture, policy: DevicePolicyName, rate: f64) -> DeviceReport {
    run(Platform::TITAN_CUDNN, architecture, policy, 0, rate, 600)
}

fn tensorrt(architecture: Architecture, policy: DevicePolicyName, ahead: u32, rate: f64) -> f64 {
    run(Platform::TITAN_TENSORRT, architecture, policy, ahead, rate, 600).mean_ms
}

use Architecture::{BertBase, ResNet152, Vgg19};
use DevicePolicyName::{DvaBatch, NEbird, NoWait, OptWait};

#[test]
fn e2bird_figure_14_lanes_hold_more_of_a_deep_network() {
    let held = |policy| cudnn(ResNet152, policy, 350.0).holds(0.01);
    assert!(held(NEbird) && !held(OptWait));
}

/// As in the paper. One thing holds VGG back: few rows of a fully connected layer take the time of
/// reading its weights, which each lane reads for itself.
#[test]
fn e2bird_figure_14_lanes_hold_more_of_vgg() {
    let throughput = |policy| cudnn(Vgg19, policy, 800.0).throughput;
    let (windowed, naive) = (throughput(OptWait), throughput(NEbird));
    assert!(naive > 1.05 * windowed, "{naive:.0} to {windowed:.0}/s");
}

#[test]
fn dvabatch_figure_14_resnet152_is_twice_as_fast_at_high_load() {
    let to = |ahead| tensorrt(ResNet152, DvaBatch, ahead, 480.0) / tensorrt(ResNet152, NoWait, ahead, 480.0);
    assert!(to(1) < 0.5 && to(1) < to(0) && to(0) < 0.9, "{:.2}, {:.2}", to(0), to(1));
}

/// With two pairs of buffers batches run side by side, which are smaller. Small batches compute at a
/// lower rate here.
#[test]
fn dvabatch_figure_14_vgg19_is_slower_by_its_small_batches() {
    let to = |platform| {
        let mean = |policy| run(platform, Vgg19, policy, 0, 490.0, 1_500).mean_ms;
        mean(DvaBatch) / mean(NoWait)
    };
    let (fitted, same_rate) =
        (to(Platform::TITAN_TENSORRT), to(Platform { winograd_items: 0.0, ..Platform::TITAN_TENSORRT }));
    assert!(fitted > 1.1 && same_rate < fitted - 0.2, "{fitted:.2}, {same_rate:.2}");
}

/// As in the paper, with the one pair of buffers that the tuning finds.
#[test]
fn dvabatch_figure_14_vgg19_is_faster_with_one_pair() {
    let model = EmulatedModel::staged(Vgg19, Platform::TITAN_TENSORRT, 4).unwrap();
    let mut tuning = Tuning { ahead: 1, ..Tuning::new(&model, 64).unwrap() };
    tuning.diversity.pairs = 1;
    let simulation =
        DeviceSimulation::new(model, DeviceLoad::steady(460.0, 1_000, None), Duration::from_millis(200), 1);
    let mean = |policy| simulation.run(tuning.policy(policy).unwrap()).unwrap().mean_ms;
    let (staged, no_wait) = (mean(DvaBatch), mean(NoWait));
    assert!(staged < 0.8 * no_wait, "{staged:.1} to {no_wait:.1} ms");
}

/// A network's rest takes twice the time of its half, or hardly less, where policy II splits.
#[test]
fn dvabatch_section_7_2_the_rate_of_small_batches_keeps_networks_whole() {
    let figure = make("dvabatch-splits", 100);
    let most = |device: &str, model: &str| {
        let of = |row: &&Vec<String>| row[0].starts_with(device) && row[1] == model;
        let row = figure.table.iter().find(of).unwrap();
        row[2..].iter().map(|cell| cell.parse::<f64>().unwrap()).fold(0.0, f64::max)
    };
    for model in ["unet", "linknet", "vgg19"] {
        assert!(most("as it is", model) < 0.98 && most("Winograd", model) >= 0.98, "{figure}");
    }
    assert!(most("as it is", "bertbase") > 0.98, "no convolution: {figure}");
}

/// E²bird §8.5: weights that lanes share, and activations whose memory is used again.
#[test]
fn e2bird_figure_17_lanes_need_less_memory_than_one_large_batch() {
    let figure = make("e2bird-17", 100);
    let change = |row: usize, column: usize| figure.table[row][column].trim_end_matches('%').parse::<f64>().unwrap();
    for row in 1..=6 {
        assert!(change(row, 7) < -64.8 && change(row, 8) < -40.0, "{figure}");
    }
    assert!(change(7, 8) < -59.4, "the mean over the networks: {figure}");
}

/// E²bird §6.3: computing in several lanes at once takes no longer, but for very many.
#[test]
fn e2bird_figure_7_lanes_cost_little_up_to_many() {
    let figure = make("e2bird-7", 100);
    let [one, thirty_two, most] = [1, 6, 9].map(|row| number(&figure, row, 3));
    assert!(thirty_two < 1.05 * one && most > 2.0 * one, "{figure}");
}

#[test]
fn dvabatch_figure_15_bertbase_of_like_lengths_holds_more() {
    let held = |policy| run(Platform::TITAN_TENSORRT, BertBase, policy, 0, 450.0, 600).holds(0.01);
    assert!(held(DvaBatch) && !held(NoWait));
}

#[test]
fn what_another_figure_shows_is_found_by_its_own_name() {
    let options = FigureOptions { requests: 10, ..FigureOptions::default() };
    let title = |name: &str| Figure::make(name, &options).unwrap().title;
    assert_eq!(title("gslice-table-5"), title("device-model"));
    assert_eq!(title("gslice-table-4"), "GSLICE figure 11, table 4: beside one batch at a time");
}

#[test]
fn a_figure_that_is_none_is_told_what_there_is() {
    let error = Figure::make("figure-99", &FigureOptions::default()).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("'figure-99' is no figure; there are "), "{text}");
    assert!(Figure::names().all(|(name, _)| text.contains(name)), "{text}");
}
