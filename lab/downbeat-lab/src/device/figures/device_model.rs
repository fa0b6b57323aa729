//! The emulated devices' numbers beside the papers' measurements: the ones that constants were
//! fitted to, and the ones held out.

use downbeat_core::Duration;

use super::{DeviceFailure, Figure, FigureOptions, change, head};
use crate::device::{
    Architecture, Client, DeviceLimits, EmulatedModel, Operator, Platform, Served, Sharing, closed_loop, measure_mix,
};

/// The source, the platform, the network with its tokens, and batches with their milliseconds.
type Latencies = (&'static str, Platform, (Architecture, u32), &'static [(u32, f64)]);

/// Latencies that constants are fitted to: E²bird table 1; GSLICE table 5 and §4.5; published
/// latencies of ResNet-50 and BERT-large on an A100.
const FITTED: [Latencies; 8] = [
    (E2BIRD, Platform::TITAN_CUDNN, (Architecture::ResNet50, 0), &[(4, 6.8), (8, 12.1), (16, 21.5), (32, 40.1)]),
    (E2BIRD, Platform::TITAN_CUDNN, (Architecture::ResNet101, 0), &[(4, 11.8), (8, 20.6), (16, 36.2), (32, 65.4)]),
    (E2BIRD, Platform::TITAN_CUDNN, (Architecture::ResNet152, 0), &[(4, 17.3), (8, 29.2), (16, 49.5), (32, 93.7)]),
    (GSLICE, Platform::V100_TENSORRT, (Architecture::ResNet50, 0), &[(8, 9.75), (16, 14.5), (32, 25.9)]),
    (GSLICE, Platform::V100_TENSORRT, (Architecture::Vgg19, 0), &[(1, 14.0), (8, 30.54), (16, 40.95), (32, 63.12)]),
    (
        NVIDIA,
        Platform::A100_CUDNN,
        (Architecture::ResNet50, 0),
        &[(1, 5.26), (2, 5.34), (4, 6.65), (8, 8.31), (16, 11.82), (32, 19.99), (64, 35.82)],
    ),
    (NVIDIA, Platform::A100_CUDNN, (Architecture::BertLarge, 128), &[(1, 7.77), (2, 9.44), (4, 12.91), (8, 16.40)]),
    (NVIDIA, Platform::A100_CUDNN, (Architecture::BertLarge, 384), &[(1, 10.72), (2, 16.06), (4, 24.60), (8, 44.20)]),
];
/// Published latencies of the same kinds that no constant is fitted to.
const HELD_OUT: [Latencies; 3] = [
    (NVIDIA, Platform::A100_CUDNN, (Architecture::BertBase, 128), &[(1, 4.73), (2, 4.68), (4, 4.88), (8, 6.88)]),
    (NVIDIA, Platform::A100_CUDNN, (Architecture::BertBase, 384), &[(1, 4.93), (2, 7.18), (4, 10.30), (8, 16.88)]),
    ("Abacus figure 3", Platform::A100_CUDNN, (Architecture::ResNet152, 0), &[(32, 24.0)]),
];
const NVIDIA: &str = "NVIDIA DeepLearningExamples";
const E2BIRD: &str = "E²bird table 1";
const GSLICE: &str = "GSLICE table 5, §4.5";

/// The time that clients play.
const SPAN: Duration = Duration::from_millis(5_000);

struct Rows(Vec<Vec<String>>);

impl Rows {
    /// Adds a number beside the paper's. The change is shown if the paper's cell is one number.
    fn add(&mut self, used: &str, source: &str, what: &str, paper: &str, here: f64, digits: usize) {
        let off = paper.parse().map_or(String::new(), |paper: f64| change(here, paper));
        let cells = [used, source, what, paper, &format!("{here:.digits$}"), &off];
        self.0.push(cells.map(str::to_owned).to_vec());
    }

    fn held_out(&mut self, source: &str, what: &str, paper: &str, here: f64) {
        self.add("held out", source, what, paper, here, if here < 20.0 { 2 } else { 1 });
    }
}

pub(super) fn device_model(_: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let mut rows = Rows(vec![head("used | source | what | paper | here | off")]);
    latencies(&mut rows, "fitted", &FITTED);
    latencies(&mut rows, "held out", &HELD_OUT);
    mixes(&mut rows);
    products(&mut rows);
    knees(&mut rows);
    spatial_sharing(&mut rows);
    co_runners(&mut rows);
    let note = "Emulated devices beside the papers' measurements. 'fitted': constants were chosen to come close to it; 'held out': they were not.";
    Ok(Figure { note: note.to_owned(), table: rows.0, ..Figure::default() })
}

/// Adds the rows of models alone on the whole device.
fn latencies(rows: &mut Rows, used: &str, published: &[Latencies]) {
    for (source, platform, (architecture, length), points) in published {
        for (batch, latency) in *points {
            let found = EmulatedModel::new(*architecture, *platform).time(*batch, *length).as_millis_f64();
            let tokens = if *length > 0 { format!(" of {length} tokens") } else { String::new() };
            let what = format!("{architecture}, batch {batch}{tokens}, ms");
            rows.add(used, source, &what, &latency.to_string(), found, 1);
        }
    }
}

/// Adds the rows of E²bird figures 3 and 12.
fn mixes(rows: &mut Rows) {
    let model = EmulatedModel::new(Architecture::ResNet152, Platform::TITAN_CUDNN);
    let mean = |mix: &str| mix.parse().map_or(f64::NAN, |mix| measure_mix(&model, &mix).mean.as_millis_f64());
    let (few, one, many) = (mean("8,8,16"), mean("32"), mean(&["1"; 32].join(",")));
    rows.add("fitted", "E²bird figure 12", "32 batches of 1 to 8,8,16, times", "4", many / few, 2);
    rows.held_out("E²bird figure 12", "8,8,16 to one batch of 32, times", "0.91", few / one);
    rows.held_out("E²bird table 4", "4,4,8 to one batch of 16, times", "below 1", mean("4,4,8") / mean("16"));
    let (_, busy) = closed_loop(model.limits(), &[72], &[Client::new(&model, 32, 0, 72)], SPAN);
    rows.held_out("E²bird figure 3", "device busy within a batch of 32, %", "no gaps", busy * 100.0);
}

/// The ladders of DVABatch figure 5.
fn products(rows: &mut Rows) {
    let platform = Platform::TITAN_TENSORRT;
    let run = |rows, columns, batch| {
        let operator = Operator { weights: 0, ..Operator::matrix("product", rows, 576, columns) };
        platform.kernel(&operator, batch, platform.units).run.as_secs_f64()
    };
    let (a, b) = (|batch| run(3136, 64, batch), |batch| run(49, 512, batch));
    rows.held_out("DVABatch figure 5", "GEMM-A, batch 2 to 1, times", "2", a(2) / a(1));
    rows.held_out("DVABatch figure 5", "GEMM-B, batch 8 to 1, times", "1", b(8) / b(1));
    rows.held_out("DVABatch figure 5", "GEMM-B, batch 16 to 8, times", "2", b(16) / b(8));
}

/// Returns the smallest share of the units, in percent and steps of 5, with `share` of the whole
/// device's throughput.
fn knee(model: &EmulatedModel, batch: u32, share: f64) -> f64 {
    let units = model.limits().units;
    let time = |percent: u32| model.time_on(batch, 0, units * percent / 100).as_secs_f64();
    let enough = |percent: &u32| time(100) >= share * time(*percent);
    f64::from((1..=20).map(|step| step * 5).find(enough).unwrap_or(100))
}

/// Adds the rows of GSLICE figures 2 and 3 and tables 1 and 2.
fn knees(rows: &mut Rows) {
    let papers = [(Architecture::AlexNet, "30"), (Architecture::ResNet50, "60"), (Architecture::Vgg19, "70")];
    for (architecture, paper) in papers {
        let model = EmulatedModel::new(architecture, Platform::V100_TENSORRT);
        for share in [90, 95] {
            let what = format!("{architecture}, batch 1: units with {share}% of the throughput, %");
            rows.held_out("GSLICE figures 2, 3", &what, paper, knee(&model, 1, f64::from(share) / 100.0));
        }
    }
    let weights = |architecture: Architecture| {
        let operators = architecture.operators(true, 0);
        operators.iter().map(|operator| operator.weights as f64 * 4.0).sum::<f64>() / f64::from(1 << 20)
    };
    let published = [
        ("240", Architecture::AlexNet),
        ("98", Architecture::ResNet50),
        ("232", Architecture::ResNet152),
        ("549", Architecture::Vgg19),
    ];
    for (paper, architecture) in published {
        rows.held_out("GSLICE table 1", &format!("{architecture}, weights, MiB"), paper, weights(architecture));
    }
    let alone = |architecture| EmulatedModel::new(architecture, Platform::V100_TENSORRT).time(1, 0).as_millis_f64();
    let after = Platform::V100_TENSORRT.after.as_millis_f64();
    rows.held_out("GSLICE §4.4", "alexnet, batch 1, inference, ms", "1", alone(Architecture::AlexNet) - after);
    rows.held_out(
        "GSLICE table 2",
        "resnet50, batch 1, ms (from its GUE of 29.08)",
        "5.86",
        alone(Architecture::ResNet50),
    );
    rows.held_out("GSLICE table 2", "vgg16, batch 1, ms (from its GUE of 3.79)", "16.2", alone(Architecture::Vgg16));
    rows.held_out(
        "GSLICE table 2",
        "mobilenet, batch 1, ms (from its GUE of 330)",
        "1.74",
        alone(Architecture::MobileNet),
    );
    let model = EmulatedModel::new(Architecture::Vgg19, Platform::V100_TENSORRT);
    let share = model.time_on(1, 0, 24).as_millis_f64();
    rows.held_out("GSLICE figure 16", "vgg19 on 30% of the units, images/s", "15", 1e3 / share);
}

fn throughput(served: &[Served]) -> f64 {
    served.iter().map(|served| served.throughput).sum()
}

/// Adds the rows of GSLICE figures 1 and 5a, batch 1.
fn spatial_sharing(rows: &mut Rows) {
    let resnet = EmulatedModel::new(Architecture::ResNet50, Platform::V100_TENSORRT);
    let vgg = EmulatedModel::new(Architecture::Vgg19, Platform::V100_TENSORRT);
    let limits = resnet.limits();
    let play = |limits: DeviceLimits, partitions: &[u32], models: &[(&EmulatedModel, usize)]| {
        let client =
            |(model, partition): &(&EmulatedModel, usize)| Client::new(model, 1, *partition, partitions[*partition]);
        closed_loop(limits, partitions, &models.iter().map(client).collect::<Vec<_>>(), SPAN).0
    };
    let alone = [&resnet, &vgg].map(|model| play(limits, &[80], &[(model, 0)])[0].mean_ms());
    let free = play(limits, &[80], &[(&resnet, 0), (&resnet, 0), (&vgg, 0)]);
    let shares = play(limits, &[20, 20, 40], &[(&resnet, 0), (&resnet, 1), (&vgg, 2)]);
    let sliced = DeviceLimits { sharing: Sharing::TimeSliced, ..limits };
    let turns = play(sliced, &[80], &[(&resnet, 0), (&resnet, 0), (&vgg, 0)]);
    let source = "GSLICE figure 1";
    rows.add(
        "fitted",
        source,
        "resnet50 beside the others to alone, default MPS, times",
        "3",
        free[0].mean_ms() / alone[0],
        2,
    );
    rows.held_out(
        source,
        "shares 25/25/50 to default MPS, throughput, times",
        "1.5",
        throughput(&shares) / throughput(&free),
    );
    rows.held_out(source, "vgg19 beside the others to alone, no MPS, times", "3", turns[2].mean_ms() / alone[1]);
    rows.held_out(
        source,
        "default MPS to no MPS, throughput of vgg19, times",
        "above 1",
        free[2].throughput / turns[2].throughput,
    );
    let source = "GSLICE figure 5a, §4.4";
    let streams = |count: usize| throughput(&play(limits, &[80], &vec![(&resnet, 0); count]));
    rows.held_out(source, "resnet50, 2 streams to 1, throughput, times", "1.66", streams(2) / streams(1));
    rows.held_out(source, "resnet50, 8 streams to 2, throughput, times", "1", streams(8) / streams(2));
}

/// Abacus figure 3: ResNet152 with 32 pictures beside another model that is always busy.
fn co_runners(rows: &mut Rows) {
    let platform = Platform::A100_CUDNN;
    let model = EmulatedModel::new(Architecture::ResNet152, platform);
    let beside = |architecture: Architecture| {
        let other = EmulatedModel::new(architecture, platform);
        let clients = [&model, &other].map(|model| Client::new(model, 32, 0, platform.units));
        closed_loop(platform.limits(), &[platform.units], &clients, SPAN).0[0].mean_ms()
    };
    let others = [Architecture::ResNet50, Architecture::ResNet101, Architecture::BertBase].map(beside);
    let most = others.into_iter().fold(0.0, f64::max);
    rows.held_out("Abacus figure 3", "resnet152 beside vgg19, ms", "241", beside(Architecture::Vgg19));
    rows.held_out(
        "Abacus figure 3",
        "resnet152 beside vgg16, ms",
        "much longer than the others",
        beside(Architecture::Vgg16),
    );
    rows.held_out("Abacus figure 3", "resnet152 beside the worst of the others, ms", "", most);
}
