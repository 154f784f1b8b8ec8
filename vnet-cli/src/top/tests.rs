//! Tests of the screen.

use super::*;
use model::Sort;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::path::Path;
use vnet::stats::{DropReason, PortStats};
use vnet_control::api::{Balance, Port, Stats};

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
        paused: false,
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
fn rates_are_shown_and_losses_are_red() {
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
fn any_terminal_size_works() {
    let client = Client::new(Path::new("/nowhere"));
    let mut screen = screen(&client);
    for help in [false, true] {
        screen.help = help;
        for (width, height) in [(1, 1), (3, 2), (10, 3), (20, 5), (40, 10), (200, 60)] {
            drawn(&screen, width, height);
        }
    }
    screen.help = false;
    assert!(drawn(&screen, 40, 6).contains("c1"), "narrow terminals keep names and bits");
    screen.trouble = Some("cannot reach vnetd".into());
    assert!(drawn(&screen, 60, 8).contains("cannot reach vnetd"));
}

#[test]
fn keys_match_the_help() {
    let client = Client::new(Path::new("/nowhere"));
    let mut screen = screen(&client);
    let mut press = |code| screen.quits(KeyEvent::new(code, KeyModifiers::NONE));
    assert!(!press(KeyCode::Char('s')) && !press(KeyCode::Char('r')) && !press(KeyCode::Char(' ')));
    assert!(!press(KeyCode::Char('+')) && !press(KeyCode::Char('-')) && !press(KeyCode::Char('-')));
    assert!(!press(KeyCode::PageDown) && !press(KeyCode::Char('h')));
    assert!(!press(KeyCode::Char('q')), "closes the help first");
    assert!(press(KeyCode::Char('q')) && press(KeyCode::Esc));
    assert_eq!((screen.sort, screen.reverse, screen.paused), (Sort::Frames, true, true));
    assert_eq!((screen.interval_s, screen.scroll, screen.help), (1, 1, false));
    assert!(screen.quits(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
}

#[test]
fn a_daemon_that_does_not_answer_is_reported() {
    let client = Client::new(Path::new("/nowhere"));
    let mut screen = screen(&client);
    screen.refresh();
    assert!(screen.trouble.is_some_and(|text| text.contains("/nowhere")));
    assert_eq!(screen.rows.len(), 2, "the last rates stay");
}
