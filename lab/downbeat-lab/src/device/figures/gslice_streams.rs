//! GSLICE's profiles of streams: the idle time between runs, and two models side by side.

use downbeat_core::device::LaneId;
use downbeat_core::{Duration, Time};
use downbeat_report::{Axis, Line, Scale, lines};

use super::gslice::{PLATFORM, emulated, span};
use super::{DeviceFailure, Figure, FigureOptions, head, mean};
use crate::device::closed_loop::closed_loop_watched;
use crate::device::{Architecture, Client, Served};

/// A span of time in milliseconds since the beginning.
type Interval = (f64, f64);

/// Streams that each run a model over and over, and the times at which their kernels ran.
#[derive(Clone, Debug)]
struct Profile {
    served: Vec<Served>,
    /// By stream: when a kernel of the stream had units.
    kernels: Vec<Vec<Interval>>,
    /// The milliseconds in which any, and in which every stream had a kernel with units.
    any_ms: f64,
    every_ms: f64,
    all_ms: f64,
}

impl Profile {
    /// Profiles streams of models on partitions of the given units. Each stream says its partition.
    fn of(partitions: &[u32], streams: &[(Architecture, usize)], span: Duration) -> Self {
        let client = |(architecture, partition): &(Architecture, usize)| {
            Client::new(&emulated(*architecture), 1, *partition, partitions[*partition])
        };
        let clients: Vec<Client> = streams.iter().map(client).collect();
        let mut kernels: Vec<Vec<Interval>> = vec![Vec::new(); clients.len()];
        let (mut any_ms, mut every_ms, mut all_ms) = (0.0, 0.0, 0.0);
        let served = closed_loop_watched(PLATFORM.limits(), partitions, &clients, span, |device, from, to| {
            let [from, to] = [from, to].map(|time| time.since(Time::ZERO).as_millis_f64());
            let mut running = 0;
            for (lane, intervals) in (0..).zip(&mut kernels) {
                if !device.runs_kernel(LaneId(lane)) {
                    continue;
                }
                running += 1;
                match intervals.last_mut() {
                    Some(last) if last.1 >= from => last.1 = to,
                    _ => intervals.push((from, to)),
                }
            }
            any_ms += if running > 0 { to - from } else { 0.0 };
            every_ms += if running == clients.len() { to - from } else { 0.0 };
            all_ms = to;
        });
        Profile { served, kernels, any_ms, every_ms, all_ms }
    }

    /// Returns the mean microseconds between two runs of a stream. The time counts from the end of
    /// a run's last kernel to the first kernel of the next run.
    fn idle_us(&self, stream: usize) -> f64 {
        let kernels = &self.kernels[stream];
        let (mut run_ends, mut at) = (0.0, 0);
        let mut idle = Vec::new();
        for latency in &self.served[stream].latencies_ms {
            run_ends += latency;
            // Sums of times in milliseconds are off by less than a nanosecond.
            at += kernels[at..].iter().take_while(|(begins, _)| *begins < run_ends - 1e-6).count();
            if let (Some(last), Some(next)) = (at.checked_sub(1).and_then(|last| kernels.get(last)), kernels.get(at)) {
                idle.push((next.0 - last.1) * 1e3);
            }
        }
        mean(idle.into_iter())
    }

    /// Returns the milliseconds in which the stream's kernels had units.
    fn kernels_ms(&self, stream: usize) -> f64 {
        self.kernels[stream].iter().map(|(from, to)| to - from).sum()
    }

    /// Draws the first milliseconds: a line for each stream, which is up while a kernel runs.
    fn plot(&self, title: &str, names: &[String], until_ms: f64) -> String {
        let of = |(stream, intervals): (usize, &Vec<Interval>)| {
            let base = stream as f64 * 1.5;
            let shown = intervals.iter().take_while(|(from, _)| *from < until_ms);
            let points = shown.flat_map(|(from, to)| [(*from, base + 1.0), (to.min(until_ms), base)]);
            [(0.0, base)].into_iter().chain(points).collect::<Vec<_>>()
        };
        let points = self.kernels.iter().enumerate().map(of);
        let drawn: Vec<Line<'_>> =
            names.iter().zip(points).map(|(name, points)| Line { name, points, stepped: true }).collect();
        let axis = |label| Axis { label, scale: Scale::Linear };
        lines(title, "High: a kernel of this stream runs.", &axis("ms"), &axis("stream"), &drawn)
    }
}

pub(super) fn figure_5b(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let mut table =
        vec![head("figure | streams | stream | images/s | ms | idle between runs, us | no kernel on the device")];
    let mut plots = Vec::new();
    for (figure, count) in [("5b", 1_usize), ("5c", 2)] {
        let profile = Profile::of(&[PLATFORM.units], &vec![(Architecture::AlexNet, 0); count], span(options));
        for (stream, served) in profile.served.iter().enumerate() {
            table.push(vec![
                figure.to_owned(),
                count.to_string(),
                (stream + 1).to_string(),
                format!("{:.0}", served.throughput),
                format!("{:.2}", served.mean_ms()),
                format!("{:.0}", profile.idle_us(stream)),
                format!("{:.1}%", (1.0 - profile.any_ms / profile.all_ms) * 100.0),
            ]);
        }
        let names: Vec<String> = (1..=count).map(|stream| format!("stream {stream}")).collect();
        plots.push(profile.plot(&format!("Figure {figure}: kernels of AlexNet"), &names, 10.0));
    }
    let note = "AlexNet with one image, always busy. 'idle between runs': from the last kernel of a run to the first kernel of the next run of the same stream. The paper: the GPU is idle for about 700 us between two runs of one stream; with two streams each has similar gaps, and the GPU is used more. \
                The 700 us are a constant of the emulated device, taken from this figure.";
    Ok(Figure { note: note.to_owned(), table, plots, ..Figure::default() })
}

pub(super) fn figure_6(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let models = [Architecture::ResNet50, Architecture::AlexNet];
    let units = PLATFORM.units;
    // Paper §2.1.3: the knees of ResNet-50 and AlexNet are 60% and 30%.
    let (shares, free) = ([units * 60 / 100, units * 30 / 100], [units]);
    let cases: [(&str, &str, &[u32], [usize; 2]); 2] =
        [("6", "streams", &free, [0, 0]), ("7", "shares of 60% and 30%", &shares, [0, 1])];
    let mut table = vec![head(
        "figure | by | model | alone ms | ms | to alone | images/s | of its kernels' time, beside the other's",
    )];
    let mut plots = Vec::new();
    let alone = models.map(|model| Profile::of(&free, &[(model, 0)], span(options)).served[0].mean_ms());
    for (figure, by, partitions, places) in cases {
        let streams: Vec<_> = models.into_iter().zip(places).collect();
        let profile = Profile::of(partitions, &streams, span(options));
        for (stream, (served, alone)) in profile.served.iter().zip(alone).enumerate() {
            table.push(vec![
                figure.to_owned(),
                by.to_owned(),
                models[stream].to_string(),
                format!("{alone:.2}"),
                format!("{:.2}", served.mean_ms()),
                format!("{:.2}", served.mean_ms() / alone),
                format!("{:.0}", served.throughput),
                format!("{:.0}%", profile.every_ms / profile.kernels_ms(stream) * 100.0),
            ]);
        }
        let names = models.map(|model| model.to_string());
        plots.push(profile.plot(&format!("Figure {figure}: kernels by {by}"), &names, 20.0));
    }
    let note = "ResNet-50 beside AlexNet, one image each, always busy: in two streams on the whole V100 (figure 6), and on shares by the paper's knees (figure 7). 'alone': on the whole device. The paper has ResNext-50, which is not emulated. \
                The paper: in streams the kernels of one model do not overlap the other's; on shares under MPS they do, with lower latency.";
    Ok(Figure { note: note.to_owned(), table, plots, ..Figure::default() })
}
