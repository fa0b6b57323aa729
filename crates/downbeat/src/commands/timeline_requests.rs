//! The ways of pipelines' requests through their steps, of a timeline.

use std::collections::BTreeMap;
use std::fmt;

use downbeat_report::{Box as Batch, Timeline as Plot};
use downbeat_service::report::timeline::{PastLaunches, PastStep, Timeline};

/// Most requests of a pipeline that are shown, the slowest ones.
const SHOWN: usize = 20;
/// Characters of the line of a request.
const WIDTH: usize = 60;

/// The ways of the requests of one pipeline.
#[derive(Debug, PartialEq)]
pub struct Ways {
    /// The pipeline's name.
    pub pipeline: String,
    /// The number of all requests with a step in the time of the timeline.
    pub requests: usize,
    /// The slowest requests, the slowest first.
    pub shown: Vec<Way>,
}

/// The way of a request through its steps.
#[derive(Debug, PartialEq)]
pub struct Way {
    /// The request's number.
    pub request: u64,
    /// When the inputs of its first step were there, milliseconds since the timeline's begin.
    pub start: f64,
    /// When the last of its steps was done.
    pub end: f64,
    /// The steps, in the order of their begins.
    pub steps: Vec<Visit>,
}

/// A step of a request, in milliseconds since the timeline's begin.
#[derive(Debug, PartialEq)]
pub struct Visit {
    /// The number of the step.
    pub step: String,
    /// The step's model.
    pub model: String,
    /// The device.
    pub device: usize,
    /// When the step's inputs were there.
    pub reached: f64,
    /// When the run began.
    pub begin: f64,
    /// When the run ended.
    pub end: f64,
}

impl Ways {
    /// The ways of all requests of pipelines whose first step is in the timeline, by pipeline.
    pub fn of(timeline: &Timeline) -> Vec<Ways> {
        let mut all: BTreeMap<&str, BTreeMap<u64, Vec<Visit>>> = BTreeMap::new();
        let relative = |at: u64| at as f64 / 1e6 - timeline.from_ns as f64 / 1e6;
        for PastLaunches { model, device, launches, .. } in &timeline.devices {
            for launch in launches {
                for PastStep { pipeline, request, step, reached_ns } in &launch.steps {
                    let visits = all.entry(pipeline).or_default().entry(*request).or_default();
                    let [reached, begin, end] = [*reached_ns, launch.begin_ns, launch.end_ns].map(relative);
                    // The launches of a batch that is cut into segments are one visit.
                    match visits.iter_mut().find(|visit| visit.step == *step && visit.reached == reached) {
                        Some(visit) => (visit.begin, visit.end) = (visit.begin.min(begin), visit.end.max(end)),
                        None => {
                            let (step, model, device) = (step.clone(), model.clone(), *device);
                            visits.push(Visit { step, model, device, reached, begin, end });
                        }
                    }
                }
            }
        }
        all.into_iter().map(|(pipeline, requests)| Ways::slowest(pipeline, requests)).collect()
    }

    fn slowest(pipeline: &str, requests: BTreeMap<u64, Vec<Visit>>) -> Ways {
        let way = |(request, mut steps): (u64, Vec<Visit>)| {
            steps.sort_by(|a, b| a.begin.total_cmp(&b.begin).then_with(|| a.step.cmp(&b.step)));
            let start = steps.iter().map(|visit| visit.reached).fold(f64::INFINITY, f64::min);
            let end = steps.iter().map(|visit| visit.end).fold(0.0, f64::max);
            Way { request, start, end, steps }
        };
        let count = requests.len();
        let mut shown: Vec<Way> = requests.into_iter().map(way).collect();
        shown.sort_by(|a, b| (b.end - b.start).total_cmp(&(a.end - a.start)).then(a.request.cmp(&b.request)));
        shown.truncate(SHOWN);
        Ways { pipeline: pipeline.to_owned(), requests: count, shown }
    }

    /// The names of the models, by step.
    fn models(&self) -> BTreeMap<&str, &str> {
        let visits = self.shown.iter().flat_map(|way| &way.steps);
        visits.map(|visit| (visit.step.as_str(), visit.model.as_str())).collect()
    }

    /// The heading of the picture, and the words below.
    pub fn heading(&self) -> String {
        let steps: Vec<String> = self.models().iter().map(|(step, model)| format!("{step} {model}")).collect();
        let shown = if self.shown.len() < self.requests {
            format!(", the slowest {}", self.shown.len())
        } else {
            String::new()
        };
        format!("{}: {} requests{shown}; steps {}", self.pipeline, self.requests, steps.join(", "))
    }

    /// The picture: a row for each request from its first inputs on, a box for each step's run.
    pub fn plot(&self) -> String {
        let longest = self.shown.iter().map(|way| way.end - way.start).fold(0.0, f64::max);
        let steps: Vec<&str> = self.models().into_keys().collect();
        let boxes = self.shown.iter().enumerate().flat_map(|(row, way)| {
            let steps = &steps;
            way.steps.iter().map(move |visit| Batch {
                row,
                start: visit.begin - way.start,
                end: visit.end - way.start,
                label: visit.step.clone(),
                colour: steps.iter().position(|step| *step == visit.step).unwrap_or(0) % 6,
                lost: false,
                hint: format!("#{}: {visit}", way.request),
            })
        });
        let plot = Plot {
            title: "Time since the first step's inputs; a gap is waiting".to_owned(),
            unit: "ms".to_owned(),
            rows: self.shown.iter().map(|way| format!("#{}", way.request)).collect(),
            boxes: boxes.collect(),
            dots: Vec::new(),
        };
        plot.svg(0.0, longest)
    }
}

/// A line for each request: a dot is waiting, a character of a step's number its run.
impl fmt::Display for Ways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.heading())?;
        let longest = self.shown.iter().map(|way| way.end - way.start).fold(0.0, f64::max).max(1e-6);
        writeln!(f, "{:>9}  {:>9}  0{:>width$}", "request", "ms", format!("{longest:.1} ms"), width = WIDTH - 1)?;
        for way in &self.shown {
            let mut line =
                vec!['.'; (((way.end - way.start) / longest * WIDTH as f64).ceil() as usize).clamp(1, WIDTH)];
            for visit in &way.steps {
                let place = |at: f64| ((at - way.start) / longest * WIDTH as f64).max(0.0) as usize;
                let first = place(visit.begin).min(line.len() - 1);
                // The last character of a longer number tells more steps apart.
                let mark = visit.step.chars().last().unwrap_or('#');
                let last = place(visit.end).clamp(first + 1, line.len());
                line[first..last].iter_mut().for_each(|shown| *shown = mark);
            }
            let number = format!("#{}", way.request);
            writeln!(f, "{number:>9}  {:>9.2}  {}", way.end - way.start, line.iter().collect::<String>())?;
        }
        f.write_str("A dot is waiting, a number the run of that step.")
    }
}

impl fmt::Display for Visit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Visit { step, model, device, reached, begin, end } = self;
        let (waited, ran) = ((begin - reached).max(0.0), end - begin);
        write!(f, "step {step} ('{model}') on device {device} waited {waited:.3} ms and ran {ran:.3} ms")
    }
}

#[cfg(test)]
mod tests {
    use downbeat_service::report::timeline::{PastLaunch, rules};

    use super::*;

    fn launch(model: &str, begin: u64, end: u64, steps: &[(u64, &str, u64)]) -> PastLaunches {
        let step = |(request, step, reached): &(u64, &str, u64)| PastStep {
            pipeline: "photos".to_owned(),
            request: *request,
            step: (*step).to_owned(),
            reached_ns: reached * 1_000_000,
        };
        let launch = PastLaunch {
            lane: 0,
            partition: 0,
            batch: 0,
            granted: None,
            segments: [0, 1],
            rows: steps.len() as u32,
            computed_rows: steps.len() as u32,
            length: 0,
            begin_ns: begin * 1_000_000,
            end_ns: end * 1_000_000,
            steps: steps.iter().map(step).collect(),
            ..PastLaunch::default()
        };
        let (model, version, policy) = (model.to_owned(), "1".to_owned(), "exclusive".to_owned());
        let (lanes, launches) = (vec![8], vec![launch]);
        PastLaunches {
            model,
            version,
            backend: String::new(),
            device: 0,
            partition: 0,
            policy,
            lanes,
            complete: true,
            launches,
        }
    }

    #[test]
    fn a_request_can_be_followed_through_its_steps() {
        let devices = vec![
            launch("decode", 10, 20, &[(7, "0", 10), (8, "0", 5)]),
            launch("detect", 30, 60, &[(7, "1", 20)]),
            launch("plain", 0, 1, &[]),
        ];
        let ways =
            Ways::of(&Timeline { from_ns: 0, now_ns: 100_000_000, devices, rules: rules(), backends: Vec::new() });
        let [photos] = &ways[..] else { panic!("{ways:?}") };
        assert_eq!(photos.requests, 2);
        let text = photos.to_string();
        assert!(text.starts_with("photos: 2 requests; steps 0 decode, 1 detect\n"), "{text}");
        let line = |request: &str| text.lines().find(|line| line.contains(request)).unwrap().trim().to_owned();
        let way = |waits: [usize; 2], runs: [usize; 2]| {
            format!("{}{}{}{}", ".".repeat(waits[0]), "0".repeat(runs[0]), ".".repeat(waits[1]), "1".repeat(runs[1]))
        };
        assert_eq!(line("#7"), format!("#7      50.00  {}", way([0, 12], [12, 36])));
        assert_eq!(line("#8"), format!("#8      15.00  {}", way([6, 0], [12, 0])));
        let plot = photos.plot();
        assert!(
            plot.contains("#7: step 1 (&#39;detect&#39;) on device 0 waited 10.000 ms and ran 30.000 ms"),
            "{plot}"
        );
    }

    #[test]
    fn a_timeline_without_pipelines_has_no_ways() {
        let devices = vec![launch("plain", 0, 1, &[])];
        assert_eq!(Ways::of(&Timeline { from_ns: 0, now_ns: 1, devices, rules: rules(), backends: Vec::new() }), []);
    }
}
