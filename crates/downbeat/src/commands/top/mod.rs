//! `downbeat top`: what a server does now, in a terminal.

mod samples;
mod view;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use downbeat_bench::client::Client;
use downbeat_report::say;
use downbeat_service::report::live::LiveReport;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use samples::Samples;
use view::Choice;

/// How long the server may take for an answer.
const LIMIT: Duration = Duration::from_secs(5);
/// Columns and lines of a picture for a pipe or a file.
const PLAIN: (u16, u16) = (120, 40);

/// Show what a server does now: requests in time, devices, and models with the most missed requests first.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// The server
    #[arg(value_name = "URL", default_value = "http://localhost:8000", env = "DOWNBEAT_URL")]
    url: String,

    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = parse_interval)]
    interval: f64,

    /// Look for two intervals, print one picture as text, and end
    #[arg(long)]
    once: bool,
}

fn parse_interval(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=60.0).contains(seconds));
    seconds.ok_or_else(|| format!("'{text}' is no number of seconds from 0.1 to 60"))
}

/// Runs the command.
///
/// # Errors
/// If the server cannot be reached or refuses, or the output is no terminal.
pub fn run(args: &TopArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut server = Server { url: args.url.clone(), client: None };
    let interval = Duration::from_secs_f64(args.interval);
    // A server that cannot be reached is told before the terminal changes.
    let mut samples = Samples::default();
    samples.push(runtime.block_on(server.ask(true))?);
    if args.once {
        for _ in 0..2 {
            samples.push(runtime.block_on(async {
                tokio::time::sleep(interval).await;
                server.ask(false).await
            })?);
        }
        return Ok(say(format_args!("{}", text(&samples)?))?);
    }
    ensure!(std::io::stdout().is_terminal(), "the output is no terminal: --once prints one picture as text");
    let mut terminal = ratatui::try_init().context("the terminal cannot be prepared")?;
    let end = watch(&mut terminal, &runtime, &mut server, interval, samples);
    ratatui::restore();
    end
}

/// A server, and the connection to it.
struct Server {
    url: String,
    client: Option<Client>,
}

impl Server {
    /// Asks for the state now, on a new connection if the last one ended.
    async fn ask(&mut self, history: bool) -> anyhow::Result<LiveReport> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => Client::connect(&self.url, LIMIT).await?,
        };
        let report = client.get(if history { "/v2/live?history=true" } else { "/v2/live" }).await?;
        self.client = Some(client);
        Ok(report)
    }
}

#[expect(clippy::disallowed_methods, reason = "decides only when to look again")]
fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    runtime: &tokio::runtime::Runtime,
    server: &mut Server,
    interval: Duration,
    mut samples: Samples,
) -> anyhow::Result<()> {
    let mut choice = Choice::default();
    let mut next = Instant::now() + interval;
    loop {
        terminal.draw(|frame| view::draw(frame, &samples, &mut choice))?;
        if event::poll(next.saturating_duration_since(Instant::now()))? {
            if is_end(&event::read()?, &mut choice) {
                return Ok(());
            }
            continue;
        }
        next = Instant::now() + interval;
        if choice.is_paused {
            continue;
        }
        match runtime.block_on(server.ask(samples.is_empty())) {
            Ok(report) => {
                samples.push(report);
                choice.trouble = None;
            }
            // A server that is started anew answers again.
            Err(error) => choice.trouble = Some(format!("{error:#}")),
        }
    }
}

/// Does as a key says. Returns whether to end.
fn is_end(event: &Event, choice: &mut Choice) -> bool {
    let Event::Key(key) = event else { return false };
    if key.kind == KeyEventKind::Release {
        return false;
    }
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return true,
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
        KeyCode::Char('p' | ' ') => choice.is_paused = !choice.is_paused,
        KeyCode::Down | KeyCode::Char('j') => choice.table.select_next(),
        KeyCode::Up | KeyCode::Char('k') => choice.table.select_previous(),
        _ => {}
    }
    false
}

/// The picture as lines of text.
fn text(samples: &Samples) -> anyhow::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(PLAIN.0, PLAIN.1))?;
    terminal.draw(|frame| view::draw(frame, samples, &mut Choice::default()))?;
    let buffer = terminal.backend().buffer();
    let line = |row: u16| -> String {
        let cells = (0..buffer.area.width).filter_map(|column| buffer.cell((column, row)));
        cells.map(ratatui::buffer::Cell::symbol).collect::<String>().trim_end().to_owned()
    };
    let lines: Vec<String> = (0..buffer.area.height).map(line).collect();
    Ok(lines.join("\n").trim_end().to_owned())
}
