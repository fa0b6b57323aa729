//! `downbeat timeline`: draws the recent launches on a server's lanes.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use downbeat_bench::client::Client;
use downbeat_report::{Box as Batch, Page, Timeline as Plot, say};
use downbeat_service::report::timeline::{PastLaunch, PastLaunches, PastStep, Timeline};

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
    say(format_args!("{launches} launches on {} devices' lanes: {shown}", timeline.devices.len()))?;
    if let Some(reason) = why_empty(&timeline) {
        say(format_args!("{reason}"))?;
    }
    Ways::of(&timeline).iter().try_for_each(|ways| Ok(say(format_args!("\n{ways}"))?))
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
        "The last {:.3} s. A row is a lane with its largest batch, a box a launch with its items, a colour a batch.",
        span / 1e3
    ));
    if let Some(reason) = why_empty(timeline) {
        page = page.warning(reason);
    }
    let page = Ways::of(timeline).iter().fold(page, |page, ways| page.heading(&ways.heading()).plots(&[ways.plot()]));
    timeline.devices.iter().fold(page, |page, device| section(page, device, timeline, span)).html()
}

fn section(page: Page, device: &PastLaunches, timeline: &Timeline, span: f64) -> Page {
    let PastLaunches { model, version, device: number, partition, policy, lanes, complete, launches } = device;
    let part = if *partition > 0 { format!(", partition {partition}") } else { String::new() };
    let (rows, computed) = launches
        .iter()
        .fold((0u64, 0u64), |(rows, computed), l| (rows + u64::from(l.rows), computed + u64::from(l.computed_rows)));
    let mut page = page
        .heading(&format!("{model} {version} on device {number}{part}: {policy}"))
        .note(&format!("{} launches, {rows} items asked for, {computed} computed.", launches.len()));
    if !complete {
        page = page.warning("There were more launches than the server remembers: the earliest are missing.");
    }
    let all: Vec<Batch> = launches.iter().map(|launch| shown(launch, timeline)).collect();
    // Seconds without a launch have no picture.
    let mut begin = 0.0;
    while begin < span {
        let end = (begin + PICTURE_MS).min(span);
        let boxes: Vec<Batch> = all.iter().filter(|shown| shown.end > begin && shown.start < end).cloned().collect();
        if !boxes.is_empty() {
            let plot = Plot {
                title: format!("{begin:.0} to {end:.0} ms"),
                unit: "ms".to_owned(),
                rows: lanes.iter().enumerate().map(|(lane, most)| format!("{lane}: {most}")).collect(),
                boxes,
                dots: Vec::new(),
            };
            page = page.plots(&[plot.svg(begin, end)]);
        }
        begin = end;
    }
    page
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
        colour: (*batch % 6) as usize,
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
    fn a_page_has_a_row_a_lane_and_a_picture_a_second_in_which_something_ran() {
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
            device: 0,
            partition: 2,
            policy: "elastic".to_owned(),
            lanes: vec![1, 4],
            complete: false,
            launches: vec![launch(0), PastLaunch { granted: Some(12), steps: vec![step], ..launch(2_500) }],
        };
        let idle = PastLaunches { launches: Vec::new(), ..device.clone() };
        let over = |devices| Timeline { from_ns: 10_000_000_000, now_ns: 13_000_000_000, devices, rules: rules() };
        assert!(page(&over(Vec::new())).contains("No model is in service"));
        assert!(page(&over(vec![idle])).contains("No launch ran in this time"));
        let page = page(&over(vec![device]));
        assert!(!page.contains("No launch ran"), "{page}");
        assert!(
            page.contains("a&lt;b 1 on device 0, partition 2: elastic") && page.contains("the earliest are missing"),
            "{page}"
        );
        assert!(page.contains("0 to 1000 ms") && page.contains("2000 to 3000 ms") && !page.contains("1000 to 2000 ms"));
        assert!(page.contains("batch 7, segments 0 to 1: 3 items (4 computed), padded to 12, 2.000 ms"), "{page}");
        assert!(page.contains("it left then because nothing more could join it"), "{page}");
        assert!(page.contains("batch 7 (granted as 12), segments"), "{page}");
        assert!(page.contains("photos #7 step 1") && page.contains("photos: 1 requests; steps 1 a&lt;b"), "{page}");
        assert_eq!(page.matches("1: 4").count(), 2, "a row's label in each picture");
    }
}
