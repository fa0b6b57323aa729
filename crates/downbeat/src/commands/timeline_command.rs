//! `downbeat timeline`: draws the recent launches on a server's lanes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use downbeat_bench::client::Client;
use downbeat_report::{Box as Batch, Page, Table, Timeline as Plot, say};
use downbeat_service::report::timeline::{PastLaunch, PastLaunches, PastStep, Timeline, TimelineBackend};

use crate::commands::timeline_requests::Ways;
use crate::options::units::in_millis;

/// Most time in one picture, milliseconds. Longer times are drawn in several pictures, one below
/// the other.
const PICTURE_MS: f64 = 1_000.0;

/// Draw the launches on a server's lanes in the last seconds.
#[derive(Args, Debug)]
pub struct TimelineArgs {
    /// The server
    #[arg(value_name = "URL", default_value = "http://localhost:8000", env = "DOWNBEAT_URL")]
    url: String,
    /// Seconds of the past to show, at most 60
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    seconds: f64,
    /// The page to write
    #[arg(long, short, value_name = "FILE.html", default_value = "timeline.html")]
    out: PathBuf,
}

/// Runs the command.
///
/// # Errors
/// If the server cannot be reached or refuses, or the page cannot be written.
pub fn run(args: &TimelineArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let timeline: Timeline = runtime.block_on(async {
        let mut client = Client::connect(&args.url, Duration::from_secs(30)).await?;
        client.get(&format!("/v2/timeline?seconds={}", args.seconds)).await
    })?;
    let shown = args.out.display();
    downbeat_report::write(&args.out, &page(&timeline))?;
    let launches: usize = timeline.devices.iter().map(|device| device.launches.len()).sum();
    let models = timeline.devices.iter().map(|of_model| (&of_model.model, &of_model.version)).collect::<BTreeSet<_>>();
    let devices = timeline.devices.iter().map(place).collect::<BTreeSet<_>>();
    say(format_args!(
        "{launches} launches of {} on {}: {shown}",
        counted(models.len(), "model"),
        counted(devices.len(), "device")
    ))?;
    for trouble in troubles(&timeline) {
        say(format_args!("{trouble}"))?;
    }
    if let Some(reason) = why_empty(&timeline) {
        say(format_args!("{reason}"))?;
    }
    Ways::of(&timeline).iter().try_for_each(|ways| Ok(say(format_args!("\n{ways}"))?))
}

/// A device by its backend and number.
fn place(past: &PastLaunches) -> (&str, usize) {
    (&past.backend, past.device)
}

/// The name of a device.
fn named((backend, device): (&str, usize)) -> String {
    if backend.is_empty() { format!("Device {device}") } else { format!("{backend}, device {device}") }
}

/// The limits of the times of a cluster's backends, in words.
fn troubles(timeline: &Timeline) -> Vec<String> {
    let words = |its: &TimelineBackend| {
        let name = &its.backend;
        let times = match its.error_ns {
            Some(error) => format!("{name}: its times are right to {:.3} ms", in_millis(error)),
            None => format!("{name}: its clock is not known yet, and its launches are missing"),
        };
        times + if its.complete { "" } else { "; its earliest launches are missing, ask for fewer --seconds" }
    };
    timeline.backends.iter().map(words).collect()
}

fn counted(count: usize, word: &str) -> String {
    format!("{count} {word}{}", if count == 1 { "" } else { "s" })
}

/// The reason why the picture is empty, if it is.
fn why_empty(timeline: &Timeline) -> Option<&'static str> {
    if timeline.devices.is_empty() {
        return Some("No model is in service.");
    }
    let nothing = timeline.devices.iter().all(|device| device.launches.is_empty());
    nothing.then_some("No launch ran in this time; --seconds looks further back, up to 60.")
}

fn page(timeline: &Timeline) -> String {
    let span = in_millis(timeline.now_ns - timeline.from_ns);
    let mut page = Page::new("Lanes").note(&format!(
        "The last {:.3} s. A picture has a device with the lanes of all its models. A row is a lane, a box a launch with its items, a \
         colour a model.",
        span / 1e3
    ));
    if let Some(reason) = why_empty(timeline) {
        page = page.warning(reason);
    }
    let page = Ways::of(timeline).iter().fold(page, |page, ways| page.heading(&ways.heading()).plots(&[ways.plot()]));
    let page = troubles(timeline).iter().fold(page, |page, trouble| page.note(trouble));
    let mut devices: BTreeMap<(&str, usize), Vec<&PastLaunches>> = BTreeMap::new();
    timeline.devices.iter().for_each(|of_model| devices.entry(place(of_model)).or_default().push(of_model));
    let section = |page, (device, models): (&(&str, usize), &Vec<_>)| section(page, *device, models, timeline, span);
    devices.iter().fold(page, section).html()
}

/// The figures of all models on a device, and a picture for each second in which something ran.
fn section(page: Page, device: (&str, usize), models: &[&PastLaunches], timeline: &Timeline, span: f64) -> Page {
    let mut page = page.table(&named(device), &table(models, span));
    if !models.iter().all(|of_model| of_model.complete) {
        page = page.warning("There were more launches than the server remembers: the earliest are missing.");
    }
    // A model without a launch has no row: others stand closer together.
    let drawn: Vec<&PastLaunches> = models.iter().copied().filter(|model| !model.launches.is_empty()).collect();
    let (mut rows, mut all) = (Vec::new(), Vec::new());
    for (colour, of_model) in drawn.into_iter().enumerate() {
        let first = rows.len();
        let used = of_model.launches.iter().map(|launch| launch.lane as usize + 1).max().unwrap_or_default();
        let lanes = of_model.lanes.len().max(used);
        rows.extend((0..lanes).map(|lane| label(models, of_model, (lane, lanes))));
        all.extend(of_model.launches.iter().map(|launch| {
            let shown = shown(launch, timeline);
            Batch { row: first + shown.row, colour, hint: format!("{}: {}", of_model.model, shown.hint), ..shown }
        }));
    }
    // Seconds without a launch have no picture.
    let mut begin = 0.0;
    while begin < span {
        let end = (begin + PICTURE_MS).min(span);
        let boxes: Vec<Batch> = all.iter().filter(|shown| shown.end > begin && shown.start < end).cloned().collect();
        if !boxes.is_empty() {
            let title = format!("{}, {begin:.0} to {end:.0} ms", named(device));
            let plot = Plot { title, unit: "ms".to_owned(), rows: rows.clone(), boxes, dots: Vec::new() };
            page = page.plots(&[plot.svg(begin, end)]);
        }
        begin = end;
    }
    page
}

/// The models of a device. The busy share is of all their lanes together.
fn table<'a>(models: &[&'a PastLaunches], span: f64) -> Table<&'a PastLaunches> {
    let sum =
        |of: fn(&PastLaunch) -> u64| move |model: &&PastLaunches| -> u64 { model.launches.iter().map(of).sum::<u64>() };
    let partition = |model: &&PastLaunches| (model.partition > 0).then_some(model.partition);
    let busy = sum(|launch| launch.end_ns.saturating_sub(launch.begin_ns));
    Table::of(models.iter().copied())
        .text("model", |model| model.model.clone())
        .text("version", |model| model.version.clone())
        .some("partition", partition)
        .text("policy", |model| model.policy.clone())
        .number("lanes", |model| model.lanes.len())
        .text("largest batch of each", |model| model.lanes.iter().map(u32::to_string).collect::<Vec<_>>().join(", "))
        .number("launches", |model| model.launches.len())
        .number("items asked for", sum(|launch| u64::from(launch.rows)))
        .number("computed", sum(|launch| u64::from(launch.computed_rows)))
        .number("busy", move |model| format!("{:.1}%", 100.0 * in_millis(busy(model)) / span.max(1e-9)))
}

/// The label of a lane: as much of model, version, partition and lane as tells it from others.
fn label(models: &[&PastLaunches], of_model: &PastLaunches, (lane, lanes): (usize, usize)) -> String {
    let same = models.iter().filter(|other| other.model == of_model.model);
    let mut label = of_model.model.clone();
    if same.clone().any(|other| other.version != of_model.version) {
        label += &format!(" {}", of_model.version);
    }
    if same.clone().any(|other| other.partition != of_model.partition) {
        label += &format!(", part {}", of_model.partition);
    }
    if lanes > 1 {
        label += &format!(", lane {lane}");
    }
    label
}

fn shown(launch: &PastLaunch, timeline: &Timeline) -> Batch {
    let PastLaunch {
        lane,
        partition,
        batch,
        granted,
        segments: [first, end],
        rows,
        computed_rows,
        length,
        begin_ns,
        end_ns,
        steps,
        left,
        ..
    } = launch;
    let relative = |at: u64| at as f64 / 1e6 - timeline.from_ns as f64 / 1e6;
    let why = left.as_ref().and_then(|left| timeline.rules.get(&left.rule));
    let why = why.map_or(String::new(), |why| format!("; it left then because {why}"));
    let granted = granted.map_or(String::new(), |granted| format!(" (granted as {granted})"));
    let part = if *partition > 0 { format!(", partition {partition}") } else { String::new() };
    let length = if *length > 0 { format!(", padded to {length}") } else { String::new() };
    Batch {
        row: *lane as usize,
        start: relative(*begin_ns),
        end: relative(*end_ns),
        label: rows.to_string(),
        colour: 0,
        lost: false,
        hint: format!(
            "batch {batch}{granted}, segments {first} to {}: {rows} items ({computed_rows} computed){length}{part}, {:.3} ms{why}{}",
            end.saturating_sub(1),
            in_millis(end_ns - begin_ns),
            members(steps)
        ),
    }
}

/// The steps of pipelines in a launch, in words.
fn members(steps: &[PastStep]) -> String {
    let names =
        steps.iter().map(|PastStep { pipeline, request, step, .. }| format!("{pipeline} #{request} step {step}"));
    let names: Vec<String> = names.collect();
    if names.is_empty() { String::new() } else { format!("; {}", names.join(", ")) }
}

#[cfg(test)]
mod tests {
    use downbeat_service::report::timeline::{PastDeparture, rules};

    use super::*;

    #[test]
    fn a_picture_has_the_lanes_of_all_models_of_a_device() {
        let launch = |begin_ms: u64| PastLaunch {
            lane: 1,
            partition: 0,
            batch: 7,
            granted: None,
            segments: [0, 2],
            rows: 3,
            computed_rows: 4,
            length: 12,
            begin_ns: (10_000 + begin_ms) * 1_000_000,
            end_ns: (10_002 + begin_ms) * 1_000_000,
            left: Some(PastDeparture { rule: "full".to_owned(), window_ns: None, latest_ns: None, behind: 0 }),
            ..PastLaunch::default()
        };
        let (pipeline, step) = ("photos".to_owned(), "1".to_owned());
        let step = PastStep { pipeline, request: 7, step, reached_ns: 12_400_000_000 };
        let device = PastLaunches {
            model: "a<b".to_owned(),
            version: "1".to_owned(),
            backend: String::new(),
            device: 0,
            partition: 2,
            policy: "elastic".to_owned(),
            lanes: vec![1, 4],
            complete: false,
            launches: vec![launch(0), PastLaunch { granted: Some(12), steps: vec![step], ..launch(2_500) }],
        };
        let idle = PastLaunches { launches: Vec::new(), ..device.clone() };
        let (from_ns, now_ns) = (10_000_000_000, 13_000_000_000);
        let over = |devices| Timeline { from_ns, now_ns, devices, rules: rules(), backends: Vec::new() };
        assert!(page(&over(Vec::new())).contains("No model is in service"));
        assert!(page(&over(vec![idle])).contains("No launch ran in this time"));
        let other = PastLaunches { model: "other".to_owned(), partition: 0, lanes: vec![8], ..device.clone() };
        let page = page(&over(vec![device.clone(), other]));
        assert!(!page.contains("No launch ran"), "{page}");
        assert!(page.contains(">Device 0</h2>") && page.contains("the earliest are missing"), "{page}");
        assert!(
            page.contains("<th scope=\"row\">a&lt;b</th>") && page.contains("<td>2</td><td class=\"text\">1, 4</td>"),
            "{page}"
        );
        let pictures = ["Device 0, 0 to 1000 ms", "Device 0, 2000 to 3000 ms"];
        assert!(pictures.iter().all(|title| page.contains(title)) && !page.contains("1000 to 2000 ms"), "{page}");
        assert!(
            page.contains("a&lt;b: batch 7, segments 0 to 1: 3 items (4 computed), padded to 12, 2.000 ms"),
            "{page}"
        );
        assert!(page.contains("it left then because nothing more could join it"), "{page}");
        assert!(page.contains("batch 7 (granted as 12), segments"), "{page}");
        assert!(page.contains("photos #7 step 1") && page.contains("photos: 1 requests; steps 1 a&lt;b"), "{page}");
        let backends = [("east", Some(70_000)), ("west", None)].map(|(backend, error_ns)| TimelineBackend {
            backend: backend.to_owned(),
            error_ns,
            complete: error_ns.is_some(),
        });
        let away = |backend: &str| PastLaunches { backend: backend.to_owned(), ..device.clone() };
        let cluster = Timeline { backends: backends.into(), ..over(vec![away("east"), away("north")]) };
        let whole = super::page(&cluster);
        for text in ["east, device 0", "north, device 0, 0 to 1000 ms", "right to 0.070 ms", "west: its clock is not"] {
            assert!(whole.contains(text), "{text}: {whole}");
        }
        // Both models stand in each picture of the device.
        for label in ["a&lt;b, lane 1", "other, lane 1"] {
            assert_eq!(page.matches(&format!("{label}<title>")).count(), 2, "{label}: {page}");
        }
    }
}
