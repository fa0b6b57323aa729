//! The picture of a server in a terminal.

use downbeat_service::report::live::{LiveReport, ProcessState};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row as Cells, Sparkline, Table, TableState};

use super::samples::{Row, SPANS_S, Samples};

/// Share of the requests that should be in time, as the page `/ui` and the alerts have it.
const OBJECTIVE: f64 = 0.99;
/// Devices that are shown at most.
const MOST_DEVICES: usize = 8;

/// What the user has chosen.
#[derive(Default)]
pub(super) struct Choice {
    /// The chosen row.
    pub table: TableState,
    pub is_paused: bool,
    /// Why the last question has no answer.
    pub trouble: Option<String>,
}

/// Draws everything.
pub(super) fn draw(frame: &mut Frame<'_>, samples: &Samples, choice: &mut Choice) {
    let busy = samples.busy();
    let devices = busy.len().min(MOST_DEVICES) as u16 + 2;
    let [head, middle, models, foot] = Layout::vertical([
        Constraint::Length(3),
        Constraint::Length(devices.max(4)),
        Constraint::Min(4),
        Constraint::Length(2),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(summary(samples)), head);
    let [left, right] = Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]).areas(middle);
    draw_devices(frame, left, &busy);
    draw_attainment(frame, right, samples);
    let rows = samples.rows();
    choice.table.select(choice.table.selected().map(|at| at.min(rows.len().saturating_sub(1))));
    draw_models(frame, models, &rows, choice);
    frame.render_widget(Paragraph::new(footer(&rows, choice)), foot);
}

/// Good, doubtful or bad, by a share of requests in time.
fn color(share: f64) -> Color {
    match share {
        share if share >= OBJECTIVE => Color::Green,
        share if share >= 0.95 => Color::Yellow,
        _ => Color::Red,
    }
}

fn percent(share: Option<f64>) -> Span<'static> {
    match share {
        None => Span::raw("–"),
        Some(share) => Span::styled(format!("{:.2}%", 100.0 * share), color(share)),
    }
}

fn summary(samples: &Samples) -> Vec<Line<'static>> {
    let Some(report) = samples.last() else { return vec![Line::raw("no answer yet")] };
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let [minutes, hour] = SPANS_S.map(|seconds| samples.share(seconds));
    let (now, seconds) = samples.lately();
    let burn = hour.value().map(|share| (1.0 - share) / (1.0 - OBJECTIVE));
    let rate = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
    let (offered, good) = (rate(now.offered), rate(now.in_time));
    let mut shares = vec![Span::raw("in time: ")];
    for (name, share) in [("now ", now), ("   5 min ", minutes), ("   1 h ", hour)] {
        shares.extend([Span::raw(name), percent(share.value())]);
    }
    if let Some(burn) = burn {
        let style = if burn <= 1.0 { Color::Green } else { Color::Red };
        shares.extend([Span::raw("   burn rate in 1 h "), Span::styled(format!("{burn:.2}"), style)]);
    }
    let today_s = report.wall_ms / 1000 % 86_400;
    let clock = format!("{:02}:{:02}:{:02} UTC", today_s / 3600, today_s / 60 % 60, today_s % 60);
    vec![
        Line::from(vec![
            Span::styled(format!("{} {}", report.server, report.version), bold),
            Span::raw(format!("   {clock}")),
        ]),
        Line::from(shares),
        Line::raw(format!("offered {offered:.1}/s, in time {good:.1}/s{}", processes(report))),
    ]
}

/// The processes of a cluster in words, first the number of all and then those without fresh counts.
fn processes(report: &LiveReport) -> String {
    if report.processes.is_empty() {
        return String::new();
    }
    let count = |role: &str| report.processes.iter().filter(|process| process.role == role).count();
    let mut words = format!("   of {} frontends and {} backends", count("frontend"), count("backend"));
    for process in report.processes.iter().filter(|process| process.state != ProcessState::Answers) {
        let state = if process.state == ProcessState::Gone { "is gone" } else { "is silent" };
        words += &format!("; {} {state}, its last counts stand", process.name);
    }
    words
}

fn draw_devices(frame: &mut Frame<'_>, area: Rect, busy: &[(String, f64)]) {
    let block = Block::bordered().title("Devices, busy share");
    let width = usize::from(block.inner(area).width);
    let shown = busy.iter().take(MOST_DEVICES);
    let widest = shown.clone().map(|(name, _)| name.chars().count()).max().unwrap_or_default().clamp(3, width / 2);
    let bar = |(name, share): &(String, f64)| {
        let cells = width.saturating_sub(9 + widest);
        let name: String = name.chars().take(widest).collect();
        let full = (share * cells as f64).round() as usize;
        Line::raw(format!(
            "{name:>widest$} {}{} {:>3.0}%",
            "█".repeat(full),
            "·".repeat(cells.saturating_sub(full)),
            100.0 * share
        ))
    };
    let lines: Vec<Line<'_>> = shown.map(bar).collect();
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn draw_attainment(frame: &mut Frame<'_>, area: Rect, samples: &Samples) {
    let block = Block::bordered().title("In time, each second");
    let width = usize::from(block.inner(area).width);
    let seconds = samples.seconds();
    let shown = seconds.get(seconds.len().saturating_sub(width)..).unwrap_or_default();
    // A second without requests is empty; the lowest bar is 0%.
    let data: Vec<Option<u64>> = shown.iter().map(|share| share.map(|share| (100.0 * share).round() as u64)).collect();
    let worst = shown.iter().flatten().copied().fold(1.0, f64::min);
    let line = Sparkline::default().block(block).data(data).max(100).style(Style::new().fg(color(worst)));
    frame.render_widget(line, area);
}

fn draw_models(frame: &mut Frame<'_>, area: Rect, rows: &[Row], choice: &mut Choice) {
    let head = [
        "model",
        "state",
        "SLO ms",
        "offered/s",
        "in time",
        "p50 ms",
        "p99 ms",
        "batch",
        "slowdown",
        "waiting",
        "missed, why",
    ];
    let widths = [
        Constraint::Min(14),
        Constraint::Length(11),
        Constraint::Length(8),
        Constraint::Length(9),
        Constraint::Length(8),
        Constraint::Length(7),
        Constraint::Length(7),
        Constraint::Length(6),
        Constraint::Length(8),
        Constraint::Length(7),
        Constraint::Min(20),
    ];
    let number = |value: Option<f64>| Cell::from(value.map_or("–".to_owned(), |value| format!("{value:.1}")));
    let cells = rows.iter().map(|row| {
        let model = &row.model;
        let is_late = row.latency_ms.zip(model.slo_ms).is_some_and(|([_, most], slo)| most > slo);
        let most = number(row.latency_ms.map(|its| its[1]));
        Cells::new([
            Cell::from(format!("{} {}", model.model, model.version)),
            Cell::from(model.state.to_lowercase()),
            Cell::from(model.slo_ms.map_or("–".to_owned(), |slo| format!("{slo}"))),
            Cell::from(format!("{:.1}", row.rate)),
            Cell::from(percent(row.share.value())),
            number(row.latency_ms.map(|its| its[0])),
            if is_late { most.style(Color::Red) } else { most },
            number(row.batch),
            Cell::from(model.slowdown.map_or("–".to_owned(), |times| format!("{times:.2}"))),
            Cell::from(model.waiting.to_string()),
            Cell::from(row.reason.as_ref().map_or(String::new(), |(why, count)| format!("{count} {why}"))),
        ])
    });
    let table = Table::new(cells, widths)
        .header(Cells::new(head).style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(Block::bordered().title("Models, last 10 s"));
    frame.render_stateful_widget(table, area, &mut choice.table);
}

fn footer(rows: &[Row], choice: &Choice) -> Vec<Line<'static>> {
    let chosen = choice.table.selected().and_then(|at| rows.get(at));
    let about = match (&choice.trouble, chosen) {
        (Some(trouble), _) => Line::styled(trouble.clone(), Color::Red),
        (None, Some(row)) => {
            let its = &row.model;
            let why = if its.reason.is_empty() { String::new() } else { format!(": {}", its.reason) };
            let policy = if its.policy.is_empty() { String::new() } else { format!(", policy {}", its.policy) };
            let kind = if its.ensemble { "an ensemble".to_owned() } else { format!("batches up to {}", its.max_batch) };
            Line::raw(format!("{} {}: {}{why}, {kind}{policy}", its.model, its.version, its.state.to_lowercase()))
        }
        (None, None) => Line::default(),
    };
    let keys = if choice.is_paused { "paused, p goes on" } else { "p pauses" };
    vec![
        about,
        Line::raw(format!("q quits, {keys}, ↑ and ↓ choose a model; `downbeat log why` tells why a request missed")),
    ]
}
