//! Layout of `vnet top`: a title line, the table, a line of keys. Narrow terminals drop the least important columns.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Clear, Paragraph, Row as TableRow, Table};

use super::model::{Row, short};
use super::screen::Screen;

/// A column: heading, width, and the minimum terminal width at which it is shown.
struct Column {
    heading: &'static str,
    width: u16,
    from_width: u16,
    cell: fn(&Row) -> String,
}

const COLUMNS: &[Column] = &[
    Column { heading: "KIND", width: 9, from_width: 60, cell: |row| row.kind.clone() },
    Column { heading: "NAME", width: 14, from_width: 0, cell: |row| row.name.clone() },
    Column { heading: "IN bit/s", width: 8, from_width: 24, cell: |row| short(row.in_bits_per_s) },
    Column { heading: "OUT bit/s", width: 9, from_width: 34, cell: |row| short(row.out_bits_per_s) },
    Column { heading: "IN fr/s", width: 7, from_width: 70, cell: |row| short(row.in_frames_per_s) },
    Column { heading: "OUT fr/s", width: 8, from_width: 80, cell: |row| short(row.out_frames_per_s) },
    Column { heading: "DROPS/s", width: 7, from_width: 44, cell: |row| short(row.drops_per_s) },
    Column { heading: "DROPS", width: 8, from_width: 90, cell: |row| row.drops.to_string() },
    Column { heading: "REASON", width: 18, from_width: 100, cell: Row::shown_reason },
];

const HELP: &[&str] = &[
    "s       sort by the next column",
    "r       reverse the order",
    "space   pause the display",
    "+ -     longer, shorter interval",
    "arrows, page up and down, home, end   move",
    "h ?     this help",
    "q Esc   quit",
    "",
    "IN: into vnet, from a guest or another host.",
    "Red: the port is losing frames or datagrams;",
    "'vnet stats' and 'vnet capture --drops' show why.",
    "(REASON): of earlier drops; none in this interval.",
];

fn columns(width: u16) -> impl Iterator<Item = &'static Column> {
    COLUMNS.iter().filter(move |column| column.from_width <= width)
}

/// Draws the screen.
pub fn draw(screen: &Screen<'_>, frame: &mut Frame<'_>) {
    let [title, table, keys] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
            .areas(frame.area());
    let order = if screen.reverse { ", reversed" } else { "" };
    let paused = if screen.paused { ", paused" } else { "" };
    let text = format!(
        "vnet top: {}, every {} s, by {}{order}{paused}",
        screen.host,
        screen.interval_s,
        screen.sort.name()
    );
    frame.render_widget(Line::styled(text, Style::new().add_modifier(Modifier::BOLD)), title);
    draw_table(screen, frame, table);
    let (text, style) = match &screen.trouble {
        Some(trouble) => (trouble.as_str(), Style::new().fg(Color::Red)),
        None => ("s sort  r reverse  space pause  h help  q quit", Style::new().fg(Color::DarkGray)),
    };
    frame.render_widget(Line::styled(text, style), keys);
    if screen.help {
        draw_help(frame);
    }
}

fn draw_table(screen: &Screen<'_>, frame: &mut Frame<'_>, area: Rect) {
    let rows = screen.rows.iter().skip(screen.scroll).map(|row| {
        let cells = columns(area.width).map(|column| right(column, (column.cell)(row)));
        let style = match (row.is_losing(), row.drops > 0) {
            (true, _) => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
            (false, true) => Style::new().fg(Color::Yellow),
            (false, false) => Style::new(),
        };
        TableRow::new(cells).style(style)
    });
    let heading = columns(area.width).map(|column| right(column, column.heading.into()));
    let heading = TableRow::new(heading).style(Style::new().add_modifier(Modifier::REVERSED));
    let widths = columns(area.width).map(|column| Constraint::Length(column.width));
    frame.render_widget(Table::new(rows, widths).header(heading).column_spacing(1), area);
}

/// Right-aligns a cell if its column holds numbers.
fn right(column: &Column, cell: String) -> String {
    if is_word(column) { cell } else { format!("{cell:>width$}", width = usize::from(column.width)) }
}

fn is_word(column: &Column) -> bool {
    matches!(column.heading, "KIND" | "NAME" | "REASON")
}

fn draw_help(frame: &mut Frame<'_>) {
    let screen = frame.area();
    let (width, height) = (52.min(screen.width), (HELP.len() as u16 + 2).min(screen.height));
    let area = Rect { x: (screen.width - width) / 2, y: (screen.height - height) / 2, width, height };
    let lines: Vec<Line<'_>> = HELP.iter().map(|line| Line::from(*line)).collect();
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" vnet top ")), area);
}

/// The table as text.
pub fn text(rows: &[Row]) -> String {
    let cells = |row: &Row| COLUMNS.iter().map(|column| (column.cell)(row)).collect::<Vec<_>>();
    let mut table = crate::show::TextTable::new(
        &COLUMNS.iter().map(|column| column.heading).collect::<Vec<_>>(),
        &[2, 3, 4, 5, 6, 7],
    );
    rows.iter().for_each(|row| table.push(cells(row)));
    table.print()
}
