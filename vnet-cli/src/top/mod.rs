//! `vnet top`: interfaces and links by rate, live in a terminal (ratatui), or once as a table or JSON.
//!
//! Every interval the counters are read and compared with those before ([`model`]); [`view`] draws what came out. Keys are
//! answered at once, whatever the interval. A daemon that stops answering is said, and asked again: it may be restarting.

mod model;
mod view;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

pub use model::Sort;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use serde_json::json;
use vnet_control::api::{Stats, Status};

use crate::args::Top;
use crate::client::Client;
use crate::{Failure, print, read};

/// Longest interval in seconds that keys reach.
const INTERVAL_MAX: u32 = 3600;

/// Shows rates until somebody leaves, or once.
pub fn run(client: &Client<'_>, top: &Top, json: bool) -> Result<(), Failure> {
    if json || top.once || !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return once(client, top, json);
    }
    let mut screen = Screen::new(client, top)?;
    let mut terminal = ratatui::try_init().map_err(|error| no_terminal(&error))?;
    let result = screen.run(&mut terminal);
    ratatui::restore();
    result
}

fn no_terminal(error: &io::Error) -> Failure {
    Failure::Lines(vec![format!("cannot use the terminal: {error}; use 'vnet top --once'")])
}

/// One table of the rates over one interval.
fn once(client: &Client<'_>, top: &Top, json: bool) -> Result<(), Failure> {
    let (before, started) = (stats(client)?, Instant::now());
    std::thread::sleep(Duration::from_secs(top.interval.into()));
    let (now, time) = (stats(client)?, started.elapsed());
    let mut rows = model::rows(&before, &now, time);
    model::sort(&mut rows, top.sort, false);
    if json {
        let answer = json!({ "interval_s": time.as_secs_f64(), "ports": rows });
        return print(&format!("{answer}\n"));
    }
    print(&view::text(&rows))
}

fn stats(client: &Client<'_>) -> Result<Stats, Failure> {
    read(&client.get("/v1/stats")?)
}

/// What is on the screen.
struct Screen<'a> {
    client: &'a Client<'a>,
    host: String,
    interval_s: u32,
    sort: Sort,
    reverse: bool,
    held: bool,
    help: bool,
    /// First row shown.
    scroll: usize,
    rows: Vec<model::Row>,
    /// Why the figures are old.
    trouble: Option<String>,
    last: Stats,
    at: Instant,
}

impl<'a> Screen<'a> {
    fn new(client: &'a Client<'a>, top: &Top) -> Result<Screen<'a>, Failure> {
        let status: Status = read(&client.get("/v1/status")?)?;
        let last = stats(client)?;
        Ok(Screen {
            client,
            host: status.host,
            interval_s: top.interval,
            sort: top.sort,
            reverse: false,
            held: false,
            help: false,
            scroll: 0,
            // At once, with nothing moving yet.
            rows: model::rows(&last, &last, Duration::from_secs(1)),
            trouble: None,
            last,
            at: Instant::now(),
        })
    }

    fn run(&mut self, terminal: &mut DefaultTerminal) -> Result<(), Failure> {
        loop {
            model::sort(&mut self.rows, self.sort, self.reverse);
            terminal.draw(|frame| view::draw(self, frame)).map_err(|error| no_terminal(&error))?;
            let due = Duration::from_secs(self.interval_s.into()).saturating_sub(self.at.elapsed());
            if event::poll(due).map_err(|error| no_terminal(&error))? {
                match event::read().map_err(|error| no_terminal(&error))? {
                    Event::Key(key) if key.kind != KeyEventKind::Release && self.leaves(key) => return Ok(()),
                    // A resized terminal is drawn anew like after anything else.
                    _ => {}
                }
            } else {
                self.look();
            }
        }
    }

    /// Reads the counters again.
    fn look(&mut self) {
        let time = self.at.elapsed();
        self.at = Instant::now();
        match stats(self.client) {
            Ok(now) => {
                if !self.held {
                    self.rows = model::rows(&self.last, &now, time);
                }
                self.last = now;
                self.trouble = None;
            }
            Err(failure) => self.trouble = failure.to_string().lines().next().map(String::from),
        }
    }

    /// Does what a key says; true when it says to leave.
    fn leaves(&mut self, key: KeyEvent) -> bool {
        let last = self.rows.len().saturating_sub(1);
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('h' | '?') => self.help = !self.help,
            KeyCode::Esc | KeyCode::Char('q') if self.help => self.help = false,
            KeyCode::Esc | KeyCode::Char('q') => return true,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char(' ') => self.held = !self.held,
            KeyCode::Char('+') => self.interval_s = (self.interval_s + 1).min(INTERVAL_MAX),
            KeyCode::Char('-') => self.interval_s = (self.interval_s - 1).max(1),
            KeyCode::Down => self.scroll = (self.scroll + 1).min(last),
            KeyCode::Up => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageDown => self.scroll = (self.scroll + view::PAGE).min(last),
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(view::PAGE),
            KeyCode::Home => self.scroll = 0,
            KeyCode::End => self.scroll = last,
            _ => {}
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use std::path::Path;
    use vnet::stats::{DropReason, PortStats};
    use vnet_control::api::{Balance, Port};

    fn counted(frames: u64, drops: u64) -> Stats {
        let port = |kind: &str, name: &str, frames: u64, drops| {
            let stats = PortStats::default();
            stats.in_frames.add(frames);
            stats.in_bytes.add(frames * 125);
            stats.drop_frames(DropReason::NoBuffer, drops);
            Port { kind: kind.into(), name: name.into(), counters: (&stats).into() }
        };
        let ports = vec![port("interface", "c1", frames, 0), port("link", "h2", frames / 2, drops)];
        let balance = Balance::of(ports.iter().map(|port| &port.counters));
        Stats { ports, dispatchers: vec![], balance }
    }

    fn screen<'a>(client: &'a Client<'a>) -> Screen<'a> {
        let (before, now) = (counted(0, 0), counted(2_000_000, 30));
        Screen {
            client,
            host: "h1".into(),
            interval_s: 1,
            sort: Sort::Bits,
            reverse: false,
            held: false,
            help: false,
            scroll: 0,
            rows: model::rows(&before, &now, Duration::from_secs(1)),
            trouble: None,
            last: now,
            at: Instant::now(),
        }
    }

    fn drawn(screen: &Screen<'_>, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view::draw(screen, frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn rates_are_on_the_screen_and_losses_stand_out() {
        let client = Client::new(Path::new("/nowhere"));
        let screen = screen(&client);
        let text = drawn(&screen, 100, 12);
        for word in ["h1", "c1", "h2", "2.00M", "2.00G", "30", "no_buffer", "by bits"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        let mut terminal = Terminal::new(TestBackend::new(100, 12)).unwrap();
        terminal.draw(|frame| view::draw(&screen, frame)).unwrap();
        let red = |y: u16| {
            let buffer = terminal.backend().buffer();
            (0..100).any(|x| buffer[(x, y)].fg == ratatui::style::Color::Red)
        };
        let row_of = |word: &str| text.lines().position(|line| line.contains(word)).expect("a row") as u16;
        assert!(red(row_of(" h2 ")) && !red(row_of(" c1 ")), "{text}");
    }

    #[test]
    fn any_size_of_terminal_will_do() {
        let client = Client::new(Path::new("/nowhere"));
        let mut screen = screen(&client);
        for help in [false, true] {
            screen.help = help;
            for (width, height) in [(1, 1), (3, 2), (10, 3), (20, 5), (40, 10), (200, 60)] {
                drawn(&screen, width, height);
            }
        }
        screen.help = false;
        assert!(drawn(&screen, 40, 6).contains("c1"), "names and bits come first where there is little room");
        screen.trouble = Some("cannot reach vnetd".into());
        assert!(drawn(&screen, 60, 8).contains("cannot reach vnetd"));
    }

    #[test]
    fn keys_do_what_the_help_says() {
        let client = Client::new(Path::new("/nowhere"));
        let mut screen = screen(&client);
        let mut press = |code| screen.leaves(KeyEvent::new(code, KeyModifiers::NONE));
        assert!(!press(KeyCode::Char('s')) && !press(KeyCode::Char('r')) && !press(KeyCode::Char(' ')));
        assert!(!press(KeyCode::Char('+')) && !press(KeyCode::Char('-')) && !press(KeyCode::Char('-')));
        assert!(!press(KeyCode::PageDown) && !press(KeyCode::Char('h')));
        assert!(!press(KeyCode::Char('q')), "leaves the help first");
        assert!(press(KeyCode::Char('q')) && press(KeyCode::Esc));
        assert_eq!((screen.sort, screen.reverse, screen.held), (Sort::Frames, true, true));
        assert_eq!((screen.interval_s, screen.scroll, screen.help), (1, 1, false));
        assert!(screen.leaves(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    }

    #[test]
    fn a_daemon_that_does_not_answer_is_said() {
        let client = Client::new(Path::new("/nowhere"));
        let mut screen = screen(&client);
        screen.look();
        assert!(screen.trouble.is_some_and(|text| text.contains("/nowhere")));
        assert_eq!(screen.rows.len(), 2, "the last figures stay");
    }
}
